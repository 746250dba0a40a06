"""A chat's answer as OpenAI's `/v1/responses` writes it: a response object, and the events that build it up. Pure.

Output items come one after the other, each closed before the next begins: what the model thought, its text, its calls.
Events are numbered through. The response object itself stands in the first events and in the last.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.answer_shapes import Dialect, Event, Stamp
from stageline_gateway.openai_api.dialects.responses_request import ResponsesRequest
from stageline_gateway.openai_api.dialects.responses_tools import written_tools


@dataclass(slots=True)
class _Item:
    """An output item; `texts` are the pieces of its text or arguments."""

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    namespace: str | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def written(self, status: str, begun: bool = False) -> dict[str, Any]:
        """The item as it is now; just `begun`, it has no content yet."""
        item = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "function_call":
                item |= {"call_id": self.call_id, "name": self.name, "arguments": self.text}
                return item if self.namespace is None else item | {"namespace": self.namespace}
            case "reasoning":
                return item | {"summary": [], "content": [] if begun else [self.part]}
            case _:
                return item | {"role": "assistant", "content": [] if begun else [self.part]}


_DELTAS = {
    "message": ("response.output_text.delta", "response.output_text.done"),
    "reasoning": ("response.reasoning_text.delta", "response.reasoning_text.done"),
    "function_call": ("response.function_call_arguments.delta", "response.function_call_arguments.done"),
}
_SERVER_ERRORS = 500
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesDialect(Dialect):
    def __init__(self, asked: ResponsesRequest, stamp: Stamp) -> None:
        self._asked = asked
        self._stamp = stamp
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._status = "in_progress"
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None

    def begin(self, prompt_tokens: int) -> list[Event]:  # noqa: ARG002 - the dialect's signature
        return [self._event(name, response=self.whole()) for name in ("response.created", "response.in_progress")]

    def take(self, delta: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if thought := delta.get("reasoning_content"):
            events += self._more("reasoning", thought)
        if content := delta.get("content"):
            events += self._more("message", content)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                events += self._begin(self._called(function["name"], call["id"]))
            if function["arguments"]:
                events += self._add(function["arguments"])
        return events

    def _called(self, name: str, call_id: str) -> _Item:
        """The item of a call of the chat's function `name`."""
        offered = next(one for one in self._asked.functions if one.name == name)
        return _Item("function_call", _new_id("fc"), offered.tool.name, call_id, offered.namespace)

    def end(self, reason: str, counts: dict[str, Any], stop_string: str | None) -> list[Event]:  # noqa: ARG002
        is_cut = reason == "length"
        self._status = "incomplete" if is_cut else "completed"
        self._usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }
        events = self._close(self._status)
        return [*events, self._event(f"response.{self._status}", response=self.whole())]

    def failed(self, error: ApiError) -> list[Event]:
        begun = [] if self._number else self.begin(0)
        code = "server_error" if error.status >= _SERVER_ERRORS else "invalid_prompt"
        self._status, self._error = "failed", {"code": code, "message": error.message}
        events = self._close("incomplete")
        return [*begun, *events, self._event("response.failed", response=self.whole())]

    def whole(self) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self._stamp.id,
            "object": "response",
            "created_at": self._stamp.created,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self._stamp.model,
            "output": list(self._done),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": _choice(asked),
            "tools": written_tools(asked.tools),
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": asked.user,
        }

    def _event(self, event_type: str, **fields: Any) -> Event:
        event = {"type": event_type, "sequence_number": self._number} | fields
        self._number += 1
        return event

    def _of_item(self, item: _Item, event: str, **fields: Any) -> Event:
        return self._event(event, item_id=item.id, output_index=len(self._done), **fields)

    def _more(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._item is None or self._item.kind != kind:
            events = self._begin(_Item(kind, _new_id(_PREFIXES[kind])))
        return events + self._add(text)

    def _begin(self, item: _Item) -> list[Event]:
        events = self._close("completed")
        self._item = item
        started = item.written("in_progress", begun=True)
        events.append(self._event("response.output_item.added", output_index=len(self._done), item=started))
        if item.kind != "function_call":
            events.append(self._of_item(item, "response.content_part.added", content_index=0, part=item.part))
        return events

    def _add(self, text: str) -> list[Event]:
        item = self._item
        assert item is not None, "text of no item"
        item.texts.append(text)
        return [self._of_item(item, _DELTAS[item.kind][0], delta=text, **_extra(item))]

    def _close(self, status: str) -> list[Event]:
        """The end of the item that is open, if one is."""
        if (item := self._item) is None:
            return []
        self._item = None
        done = _DELTAS[item.kind][1]
        if item.kind == "function_call":
            events = [self._of_item(item, done, name=item.name, arguments=item.text)]
        else:
            events = [self._of_item(item, done, text=item.text, **_extra(item))]
            events.append(self._of_item(item, "response.content_part.done", content_index=0, part=item.part))
        written = item.written(status)
        events.append(self._event("response.output_item.done", output_index=len(self._done), item=written))
        self._done.append(written)
        return events


def _extra(item: _Item) -> dict[str, Any]:
    """What an event about text has beyond the text."""
    match item.kind:
        case "message":
            return {"content_index": 0, "logprobs": []}
        case "reasoning":
            return {"content_index": 0}
        case _:
            return {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    if asked.text is None or asked.text.format is None:
        return {"type": "text"}
    written: dict[str, Any] = msgspec.to_builtins(asked.text.format)
    return written


def _choice(asked: ResponsesRequest) -> Any:
    chosen = asked.tool_choice or "auto"
    return chosen if isinstance(chosen, str) else msgspec.to_builtins(chosen)
