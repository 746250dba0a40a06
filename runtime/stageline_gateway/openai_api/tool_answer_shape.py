"""How a chat choice is written when tools were offered: text as `content`, calls as `tool_calls`.

Calls that the model writes by itself, or a schema of required calls makes, are given out whole, one at a time. The
answer to a named function is its arguments, and streams as they come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stageline_api.engine_http import Admitted, FinishReason
from stageline_gateway.openai_api.answer_shapes import ChatShape, Logprobs, ShapeOfChoice
from stageline_gateway.openai_api.chat_types import NamedTool
from stageline_gateway.openai_api.request_types import ChatRequest
from stageline_gateway.openai_api.tool_calls import Call, CallReader, Piece, new_call_id, reader_for

CALLS_REASON = "tool_calls"


def shape_of_chat(asked: ChatRequest) -> ShapeOfChoice:
    """The shape that fits the tools of `asked`."""
    if isinstance(asked.tool_choice, NamedTool):
        name = asked.tool_choice.function.name
        return lambda index: ToolShape(index, reader_of=lambda _: NamedCall(name))
    if not asked.offered_tools:
        return ChatShape
    names = frozenset(tool.function.name for tool in asked.offered_tools)
    return lambda index: ToolShape(index, reader_of=lambda event: reader_for(event.tool_call_format, names))


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of the call begun before."""

    text: str


class NamedCall:
    """An answer that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Piece | ArgumentsPiece]:
        """The call with its first arguments, then more of them."""
        if self._begun:
            return [ArgumentsPiece(text)] if text else []
        self._begun = True
        return [Call(self._name, text, new_call_id())]

    def finish(self) -> list[Piece | ArgumentsPiece]:
        """Nothing is held back."""
        return []


@dataclass(slots=True)
class ToolShape(ChatShape):
    """One choice with calls."""

    reader_of: Callable[[Admitted], CallReader | NamedCall] = field(kw_only=True)
    _reader: CallReader | NamedCall | None = None
    _calls: int = 0

    def admitted(self, event: Admitted) -> None:
        """Learn how calls are written in this answer."""
        self._reader = self.reader_of(event)

    def opening(self) -> dict[str, Any] | None:
        """A chunk that only says who speaks; content may never come."""
        return self._choice({"role": "assistant", "content": None}, None, None)

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any] | None:
        """New text and calls that are complete."""
        return self._pieces(self._read().push(text), logprobs)

    def held_back(self) -> dict[str, Any] | None:
        """What may have become a call and didn't."""
        return self._pieces(self._read().finish(), None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The end, which a call gives a reason of its own."""
        return self._choice({}, None, self._reason(reason))

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        """One message with all calls."""
        pieces = self._read().push(text) + self._read().finish()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_written(piece) for piece in pieces if isinstance(piece, Call)]
        self._calls = len(calls)
        choice = self._choice({}, logprobs, self._reason(reason))
        del choice["delta"]
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        return choice | {"message": message | ({"tool_calls": calls} if calls else {})}

    def _read(self) -> CallReader | NamedCall:
        assert self._reader is not None, "an answer began before it was admitted"
        return self._reader

    def _reason(self, reason: FinishReason) -> str:
        return CALLS_REASON if self._calls and reason is FinishReason.STOP else reason.value

    def _pieces(self, pieces: list[Any], logprobs: Logprobs) -> dict[str, Any] | None:
        delta: dict[str, Any] = {}
        for piece in pieces:
            match piece:
                case str():
                    delta["content"] = delta.get("content", "") + piece
                case Call():
                    delta.setdefault("tool_calls", []).append({"index": self._calls} | _written(piece))
                    self._calls += 1
                case ArgumentsPiece(text=text):
                    more = {"index": self._calls - 1, "function": {"arguments": text}}
                    delta.setdefault("tool_calls", []).append(more)
        return self._choice(delta, logprobs, None) if delta or logprobs else None


def _written(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
