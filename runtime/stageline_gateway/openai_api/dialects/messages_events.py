"""A chat's answer as Anthropic's `/v1/messages` writes it: a message of content blocks, whole or as its events. Pure.

Blocks come one after the other, each closed before the next begins: thoughts, text, calls.
"""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from stageline_api.engine_http import ContextExceeded
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.answer_shapes import Dialect, Event, Stamp

REQUEST_ID_HEADER: Final = "request-id"
"""Where Anthropic's clients look for an answer's id."""
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SERVER_ERRORS: Final = 500
_CHARACTERS_A_TOKEN: Final = 16
"""That an engine takes a token for at most, where a prompt is so long that it counts no tokens."""


def error_body(error: ApiError) -> dict[str, Any]:
    """A refusal as Anthropic's clients expect it."""
    general = "api_error" if error.status >= _SERVER_ERRORS else "invalid_request_error"
    message = error.message if error.exceeded is None else _context_sentence(error.exceeded)
    return {"type": "error", "error": {"type": _ERROR_KINDS.get(error.status, general), "message": message}}


def _context_sentence(said: ContextExceeded) -> str:
    """Anthropic's words for a prompt that is too long: clients read the numbers and then adapt."""
    limit, characters = said.limit_tokens, said.prompt_characters
    if characters is not None:
        least = -(-characters // _CHARACTERS_A_TOKEN)
        return f"prompt is too long: {least} tokens > {limit} maximum (at least, of {characters} characters)"
    if said.max_tokens is None:
        return f"prompt is too long: {said.prompt_tokens} tokens > {limit} maximum"
    exceeded = f"input length and `max_tokens` exceed context limit: {said.prompt_tokens} + {said.max_tokens} > {limit}"
    return f"{exceeded}, decrease input length or `max_tokens` and try again"


@dataclass(slots=True)
class _Block:
    """A content block; `texts` are the pieces of its words or arguments."""

    kind: str
    name: str = ""
    id: str = ""
    texts: list[str] = field(default_factory=list)

    def begun(self) -> dict[str, Any]:
        """The block before its first piece."""
        return self._written({})

    def whole(self, is_cut: bool) -> dict[str, Any] | None:
        """The block with all of its pieces; `is_cut`: the token limit may have cut it off.

        A call's input is an object, which a part of one is not: there is no block of a call that was cut off, rather
        than one with an input that the model did not write. A call that the model itself wrote wrong is text.
        """
        if self.kind != "tool_use" or (made := _object(self._text)) is not None:
            return self._written(made if self.kind == "tool_use" else None)
        words = f'{{"name": {json.dumps(self.name)}, "arguments": {self._text}'
        return None if is_cut else {"type": "text", "text": words}

    @property
    def _text(self) -> str:
        return "".join(self.texts)

    def _written(self, made: dict[str, Any] | None) -> dict[str, Any]:
        match self.kind:
            case "tool_use":
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": made}
            case "thinking":
                return {"type": "thinking", "thinking": self._text, "signature": ""}
            case _:
                return {"type": "text", "text": self._text}

    def delta(self, text: str) -> dict[str, Any]:
        match self.kind:
            case "tool_use":
                return {"type": "input_json_delta", "partial_json": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case _:
                return {"type": "text_delta", "text": text}


def _object(text: str) -> dict[str, Any] | None:
    """Arguments as an object; None where they are none, since the model broke off or wrote them wrong."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _usage(prompt_tokens: int, cached: int, output_tokens: int) -> dict[str, Any]:
    """As Anthropic counts: tokens read from the cache are no input tokens; together they are the prompt."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


class MessagesDialect(Dialect):
    ping: ClassVar[Event | None] = {"type": "ping"}
    id_header: ClassVar[str] = REQUEST_ID_HEADER

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._blocks: list[_Block] = []
        self._is_open = False
        self._reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage: dict[str, Any] = {}

    def begin(self, prompt_tokens: int) -> list[Event]:
        self._usage = _usage(prompt_tokens, 0, 0)
        return [{"type": "message_start", "message": self.whole()}]

    def take(self, delta: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if thought := delta.get("reasoning_content"):
            events += self._more("thinking", thought)
        if content := delta.get("content"):
            events += self._more("text", content)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                events += self._begin(_Block("tool_use", function["name"], call["id"]))
            if function["arguments"]:
                events += self._add(function["arguments"])
        return events

    def end(self, reason: str, counts: dict[str, Any], stop_string: str | None) -> list[Event]:
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        self._reason = _REASONS[reason]
        if reason == "stop" and stop_string is not None:
            self._reason, self._stop_sequence = "stop_sequence", stop_string
        self._usage = _usage(counts["prompt_tokens"], cached, counts["completion_tokens"])
        # What is cached shows at the end alone, and a stream has counted the whole prompt at its beginning.
        streamed = _usage(counts["prompt_tokens"], 0, counts["completion_tokens"])
        ended = {"stop_reason": self._reason, "stop_sequence": self._stop_sequence}
        last: list[Event] = [{"type": "message_delta", "delta": ended, "usage": streamed}, {"type": "message_stop"}]
        return self._close() + last

    def failed(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

    def whole(self) -> dict[str, Any]:
        content = self._content()
        has_calls = any(block["type"] == "tool_use" for block in content)
        is_called = self._reason == _REASONS["tool_calls"]
        return {
            "id": self._stamp.id,
            "type": "message",
            "role": "assistant",
            "model": self._stamp.model,
            "content": content,
            "stop_reason": _REASONS["stop"] if is_called and not has_calls else self._reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage,
        }

    def _content(self) -> list[dict[str, Any]]:
        last = len(self._blocks) - 1 if self._reason == _REASONS["length"] else None
        blocks = (block.whole(is_cut=index == last) for index, block in enumerate(self._blocks))
        return [block for block in blocks if block is not None]

    def _more(self, kind: str, text: str) -> list[Event]:
        is_new = not self._is_open or self._blocks[-1].kind != kind
        events = self._begin(_Block(kind)) if is_new else []
        return events + self._add(text)

    def _begin(self, block: _Block) -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": block.begun()}]

    def _add(self, text: str) -> list[Event]:
        block = self._blocks[-1]
        block.texts.append(text)
        return [{"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": block.delta(text)}]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]
