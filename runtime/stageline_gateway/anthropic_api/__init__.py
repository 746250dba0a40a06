"""Anthropic's Messages API as types and pure functions: a checked body becomes a chat, the chat's answer a message."""
