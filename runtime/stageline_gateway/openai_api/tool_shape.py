"""The choice of a chat's answer that may call tools: `tool_calls` and their chunks. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stageline_api.engine_http import Admitted, FinishReason
from stageline_gateway.openai_api.answer_shapes import ChatShape, Logprobs, ShapeOfChoice
from stageline_gateway.openai_api.chat_types import NamedTool
from stageline_gateway.openai_api.request_types import ChatRequest
from stageline_gateway.openai_api.streamed_calls import StreamedCalls
from stageline_gateway.openai_api.tool_calls import ArgumentsPiece, Call, Piece, calls_of

CALLS_REASON = "tool_calls"


class NamedCall:
    """An answer that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Piece]:
        if self._begun:
            return [ArgumentsPiece(text)] if text else []
        self._begun = True
        return [Call(self._name, text)]

    def finish(self, is_cut: bool) -> list[Piece]:  # noqa: ARG002 - all was given out, however it ended
        return []


Reader = StreamedCalls | NamedCall


def shape_with_tools(asked: ChatRequest) -> ShapeOfChoice:
    """The shape of an answer that may call the tools which `asked` offers."""
    shape = partial(ToolShape, prompt_logprobs=asked.prompt_logprobs, goes_on=asked.goes_on)
    if isinstance(asked.tool_choice, NamedTool):
        name = asked.tool_choice.function.name
        return partial(shape, reader_of=lambda _: NamedCall(name))
    names = frozenset(tool.function.name for tool in asked.offered_tools)
    return partial(shape, reader_of=lambda event: StreamedCalls(event.tool_call_format, names))


@dataclass(slots=True)
class ToolShape(ChatShape):
    reader_of: Callable[[Admitted], Reader] = field(kw_only=True)
    _reader: Reader | None = None
    _calls: int = 0

    def admitted(self, event: Admitted) -> None:
        ChatShape.admitted(self, event)
        self._reader = self.reader_of(event)

    def opening(self) -> dict[str, Any] | None:
        return self._choice({"role": "assistant", "content": None}, None, None)

    def piece(self, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        thought, text = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return self._pieces(self._read().push(text), logprobs, thought)

    def held_back(self, reason: FinishReason) -> list[dict[str, Any]]:
        """Text that was held back because a call might have begun with it."""
        thought, text = ("", "") if self._thoughts is None else self._thoughts.finish()
        return self._pieces(self._last(text, reason), None, thought)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice({}, None, self._reason(reason))

    def whole(self, text: str, reason: FinishReason) -> dict[str, Any]:
        thought, text = self._split_whole(text)
        pieces = self._last(text, reason)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_written(call) for call in calls_of(pieces)]
        self._calls = len(calls)
        choice = self._choice({}, None, self._reason(reason))
        del choice["delta"]
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None} | thought
        return choice | {"message": message | ({"tool_calls": calls} if calls else {})}

    def _read(self) -> Reader:
        assert self._reader is not None, "an answer began before it was admitted"
        return self._reader

    def _last(self, text: str, reason: FinishReason) -> list[Piece]:
        """What is found up to the answer's end, which comes behind `text`."""
        reader = self._read()
        return [*reader.push(text), *reader.finish(is_cut=reason is not FinishReason.STOP)]

    def _reason(self, reason: FinishReason) -> str:
        return CALLS_REASON if self._calls and reason is FinishReason.STOP else reason.value

    def _pieces(self, pieces: Sequence[Piece], logprobs: Logprobs, thought: str) -> list[dict[str, Any]]:
        """Choices with what is new, in its order: in one delta, text stands before calls."""
        deltas: list[dict[str, Any]] = [{"reasoning_content": thought} if thought else {}]
        for piece in pieces:
            match piece:
                case str():
                    if "tool_calls" in deltas[-1]:
                        deltas.append({})
                    deltas[-1]["content"] = deltas[-1].get("content", "") + piece
                case Call():
                    deltas[-1].setdefault("tool_calls", []).append({"index": self._calls} | _written(piece))
                    self._calls += 1
                case ArgumentsPiece(text=text):
                    self._add_arguments(deltas[-1].setdefault("tool_calls", []), text)
        first, *others = deltas
        told = [self._choice(first, logprobs, None)] if first or logprobs else []
        return told + [self._choice(delta, None, None) for delta in others]

    def _add_arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        if not calls or calls[-1]["index"] != self._calls - 1:
            calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text


def _written(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
