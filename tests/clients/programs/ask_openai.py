"""OpenAI's client: what its users send by default, streams, several prompts, responses. Prints findings as JSON."""

import importlib
import json
import os

openai = importlib.import_module("openai")
client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="unused", max_retries=0, timeout=120)
turns = [{"role": "user", "content": "Hi", "name": "Bo"}]
limits = {"model": "tiny", "max_completion_tokens": 6, "seed": 1}
said = client.chat.completions.with_raw_response.create(messages=turns, store=True, metadata={"a": "b"}, **limits)
streamed = client.chat.completions.create(messages=turns, stream=True, **limits)
texts = client.completions.create(model="tiny", prompt=["one", "two"], echo=True, max_tokens=3)
chosen = client.chat.completions.create(
    messages=turns, extra_body={"structured_outputs": {"choice": ["red", "green"]}}, **limits
)
response = client.responses.create(model="tiny", input="Hi", max_output_tokens=6)
with client.responses.stream(model="tiny", input="Hi", max_output_tokens=6) as stream:
    kinds = [event.type for event in stream]
found = {
    "ignored": said.headers["x-stageline-ignored"],
    "whole": said.parse().choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    "texts": [choice.text[:3] for choice in texts.choices],
    "choice": chosen.choices[0].message.content,
    "response": response.output_text,
    "last_event": kinds[-1],
}
print(json.dumps(found))  # noqa: T201 - what the test reads
