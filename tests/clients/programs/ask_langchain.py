"""langchain-openai: a chat, a stream, an object of a schema, a tool that has to be called, and its result."""

import importlib
import json
import os
from typing import Any, Literal

from pydantic import BaseModel

ChatOpenAI: Any = importlib.import_module("langchain_openai").ChatOpenAI


class Town(BaseModel):
    """A town."""

    name: Literal["Oslo", "Rom"]
    is_old: bool


model = ChatOpenAI(model="tiny", base_url=os.environ["BASE_URL"] + "/v1", api_key="unused", seed=1, max_tokens=500)
brief = ChatOpenAI(model="tiny", base_url=os.environ["BASE_URL"] + "/v1", api_key="unused", seed=1, max_tokens=6)
called = model.bind_tools([Town], tool_choice="any").invoke("Which?").tool_calls
messages: Any = importlib.import_module("langchain_core.messages")
closed = {"type": "object", "properties": {"name": {"enum": ["Oslo", "Rom"]}}, "required": ["name"]}
place = {"name": "place", "description": "A place.", "parameters": closed | {"additionalProperties": False}}
caller = model.bind_tools([place], tool_choice="any", parallel_tool_calls=False)


def second_turn(said: Any) -> bool:
    results = [messages.ToolMessage("wet", tool_call_id=call["id"]) for call in said.tool_calls]
    return isinstance(brief.invoke([messages.HumanMessage("Which?"), said, *results]).content, str)


whole_call = caller.invoke("Which?")
streamed_call, *others = caller.stream("Which?")
for chunk in others:
    streamed_call += chunk
found = {
    "whole": brief.invoke("Hi").content,
    "streamed": "".join(str(chunk.content) for chunk in brief.stream("Hi")),
    "structured": model.with_structured_output(Town).invoke("Which?").name in ("Oslo", "Rom"),
    "called": called[0]["name"],
    "second_turns": [second_turn(whole_call), second_turn(streamed_call)],
}
print(json.dumps(found))  # noqa: T201 - what the test reads
