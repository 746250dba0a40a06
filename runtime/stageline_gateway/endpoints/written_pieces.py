"""The chunks of a stream of chats or completions, as the bytes that are sent.

Nearly all chunks of an answer are one choice with some more text. Where a shape's pieces differ in nothing else, the
bytes around the text are made once for each choice, by the way that makes the others, and then only the text is
written.
"""

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from stageline_api.engine_http import Delta, FinishReason, PromptTokens
from stageline_gateway.endpoints.json_answers import encode_json, sse_event
from stageline_gateway.openai_api.answer_shapes import AnswerShape, Stamp

_MARK: Final = "\x00text\x00"
"""Stands for the text of a piece: no field of a chunk holds it."""
_WRITTEN_MARK: Final = encode_json(_MARK)


def between(around: tuple[bytes, bytes], text: str) -> bytes:
    """`text` as `encode_json` writes it, in ASCII alone, with what stands around it."""
    return b"%b%b%b" % (around[0], encode_basestring_ascii(text).encode(), around[1])


class WrittenPieces:
    def __init__(self, stamp: Stamp, shapes: Sequence[AnswerShape], with_logprobs: bool, include_usage: bool) -> None:
        self._stamp = stamp
        self._shapes = shapes
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._openings: bytes | None = None

    def write_ahead(self) -> None:
        """Make what can be known of a lone choice before an engine has answered, but for what may be long."""
        if len(self._shapes) == 1 and self._shapes[0].has_short_opening:
            self._openings = self.openings()
            self.around(0)

    def openings(self) -> bytes:
        if self._openings is not None:
            return self._openings
        openings = (shape.opening() for shape in self._shapes)
        return self._chunks([opening for opening in openings if opening is not None])

    def prompt(self, choice: int, event: PromptTokens) -> bytes:
        """What a stream says of tokens of its prompt, where that is echoed."""
        chunk = self._shapes[choice].prompt(event.tokens).chunk
        return b"" if chunk is None else self._chunks([chunk])

    def delta(self, choice: int, delta: Delta) -> bytes:
        # Log probabilities may come before their text, which waits for the rest of a character.
        logprobs = delta.logprobs if self._with_logprobs else None
        if not delta.text and not logprobs:
            return b""
        if logprobs is None and (around := self.around(choice)) is not None:
            return between(around, delta.text)
        return self._chunks(self._shapes[choice].piece(delta.text, logprobs))

    def around(self, choice: int) -> tuple[bytes, bytes] | None:
        """What stands around the text of each piece of a choice; None where pieces differ in more than it, or may."""
        shape = self._shapes[choice]
        if self._with_logprobs or not shape.is_plain:  # which an engine may tell of
            return None
        if (around := self._around.get(choice)) is None:
            around = self._around[choice] = self._around_text(shape)
        return around

    def closing(self, choice: int, reason: FinishReason) -> bytes:
        shape = self._shapes[choice]
        return self._chunks([*shape.held_back(reason), shape.closing(reason)])

    def counts(self, usage: dict[str, Any]) -> bytes:
        return sse_event(self._stamp.envelope(self._shapes[0].chunk_kind, []) | {"usage": usage})

    def _around_text(self, shape: AnswerShape) -> tuple[bytes, bytes]:
        begin, _, end = self._chunks(shape.piece(_MARK, None)).partition(_WRITTEN_MARK)
        return begin, end

    def _chunks(self, choices: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(sse_event(self._chunk(choice)) for choice in choices)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._stamp.envelope(self._shapes[0].chunk_kind, [choice])
        return chunk | {"usage": None} if self._include_usage else chunk
