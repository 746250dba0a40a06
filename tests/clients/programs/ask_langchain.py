"""langchain-openai: a chat, a stream, an object of a schema, a tool that has to be called."""

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
found = {
    "whole": brief.invoke("Hi").content,
    "streamed": "".join(str(chunk.content) for chunk in brief.stream("Hi")),
    "structured": model.with_structured_output(Town).invoke("Which?").name in ("Oslo", "Rom"),
    "called": called[0]["name"],
}
print(json.dumps(found))  # noqa: T201 - what the test reads
