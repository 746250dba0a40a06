"""Other APIs than chat completions, said in a chat's words: a checked body becomes a chat, the chat's answer theirs.

OpenAI's `/v1/responses` and Anthropic's `/v1/messages`: types and pure functions, made of the chat's own types.
"""
