"""OpenAI's client: what its users send by default, streams, several prompts, responses, and second turns, where its own
message objects go back, also with a call that the token limit cut off. Prints findings as JSON."""

import importlib
import json
import os
import warnings
from typing import Any, Literal

from pydantic import BaseModel

openai: Any = importlib.import_module("openai")
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


class Town(BaseModel):
    """A town."""

    name: Literal["Oslo", "Rom"]


def streamed_message(**asked: Any) -> Any:
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0].message


def parsed_message(**asked: Any) -> Any:
    return client.chat.completions.parse(**asked).choices[0].message


def second_turn(message: Any) -> str:
    """What a chat that goes on after `message` names as ignored; the same for the object and for its dump."""
    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in message.tool_calls or []]
    named = set()
    for sent in (message, message.model_dump(warnings=False)):
        turns = [{"role": "user", "content": "Hi"}, sent, *results, {"role": "user", "content": "So?"}]
        again = client.chat.completions.with_raw_response.create(model="tiny", messages=turns, max_tokens=3)
        named.add(again.headers.get("x-stageline-ignored", ""))
    (ignored,) = named
    return str(ignored)


warnings.filterwarnings("ignore", "Pydantic serializer warnings")
ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Which?"}], "seed": 3}
tool = openai.pydantic_function_tool(Town)
chosen_tool = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "Town"}}}
forced = chosen_tool | {"max_tokens": 200}
cut = client.chat.completions.create(**ask, **chosen_tool, max_tokens=3).choices[0].message
second_turns = {
    "streamed": second_turn(streamed_message(**ask, extra_body={"structured_outputs": {"choice": ["red", "green"]}})),
    "parsed": second_turn(parsed_message(**ask, max_tokens=200, response_format=Town)),
    "streamed call": second_turn(streamed_message(**ask, **forced)),
    "parsed call": second_turn(parsed_message(**ask, **forced)),
    "cut call": second_turn(cut),
}
first = client.responses.parse(model="tiny", input="Which?", text_format=Town, max_output_tokens=200)
turns = [{"role": "user", "content": "Which?"}, *first.output, {"role": "user", "content": "So?"}]
second_response = client.responses.create(model="tiny", input=turns, max_output_tokens=6)
function = {"type": "function", "name": "Town", "parameters": Town.model_json_schema()}
cut_call = client.responses.create(
    model="tiny",
    input="Which?",
    tools=[function],
    tool_choice={"type": "function", "name": "Town"},
    max_output_tokens=3,
).output[0]
result = {"type": "function_call_output", "call_id": cut_call.call_id, "output": "no JSON"}
after_cut = client.responses.create(model="tiny", input=[turns[0], cut_call, result], max_output_tokens=6)
found = {
    "ignored": said.headers["x-stageline-ignored"],
    "whole": said.parse().choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    "texts": [choice.text[:3] for choice in texts.choices],
    "choice": chosen.choices[0].message.content,
    "response": response.output_text,
    "last_event": kinds[-1],
    "second_turns": second_turns,
    "second_response": second_response.status,
    "cut": [cut.tool_calls[0].function.arguments, cut_call.arguments],
    "after_cut": after_cut.status,
}
print(json.dumps(found))  # noqa: T201 - what the test reads
