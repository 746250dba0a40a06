"""litellm: a chat and a stream through its OpenAI provider, a message through its Anthropic one."""

import importlib
import json
import os

litellm = importlib.import_module("litellm")
turns = [{"role": "user", "content": "Hi"}]
openai = {"model": "openai/tiny", "api_base": os.environ["BASE_URL"] + "/v1", "api_key": "unused", "max_tokens": 6}
anthropic = {"model": "anthropic/tiny", "api_base": os.environ["BASE_URL"], "api_key": "unused", "max_tokens": 6}
whole = litellm.completion(messages=turns, seed=1, metadata={"a": "b"}, **openai)
streamed = list(litellm.completion(messages=turns, seed=1, stream=True, **openai))
message = litellm.completion(messages=turns, **anthropic)
found = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    "tokens": message.usage.completion_tokens,
}
print(json.dumps(found))  # noqa: T201 - what the test reads
