"""litellm: a chat and a stream through its OpenAI provider, a message through its Anthropic one, second turns."""

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

town = {"properties": {"town": {"enum": ["Oslo"]}}, "required": ["town"], "additionalProperties": False}
tool = {"type": "function", "function": {"name": "place", "parameters": town}}
forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "place"}}, "seed": 3}
long = openai | {"max_tokens": 200}
chunks = list(litellm.completion(messages=turns, stream=True, **forced, **long))
calls = [
    litellm.completion(messages=turns, **forced, **long).choices[0].message,
    litellm.stream_chunk_builder(chunks, messages=turns).choices[0].message,
]
second_turns = []
for said in calls:
    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in said.tool_calls]
    for sent in (said, said.model_dump()):
        again = litellm.completion(messages=[*turns, sent, *results], **openai)
        second_turns.append(again.choices[0].finish_reason)
found = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    "tokens": message.usage.completion_tokens,
    "second_turns": second_turns,
}
print(json.dumps(found))  # noqa: T201 - what the test reads
