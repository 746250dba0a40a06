"""OpenAI's API as types and pure functions: checked requests in, engine requests and answer bodies out."""
