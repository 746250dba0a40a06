"""An engine's lines as events. Pieces of plain text that came together are one piece.

Nearly all lines are a piece of text and its tokens. Such ones are read by a decoder that knows nothing else, and those
that follow each other are put together before anybody sees them: they came in one read, so no client would have had the
first of them sooner. All other lines, and whatever that decoder does not take, are read as `engine_http` says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field, TypeAdapter

from stageline_api.engine_http import Admitted, Delta, Event
from stageline_api.multiplexing import Refused

_LINES: TypeAdapter[Event | Refused] = TypeAdapter(Annotated[Event | Refused, Field(discriminator="type")])


class _Piece(msgspec.Struct, tag_field="type", tag="delta", forbid_unknown_fields=True, gc=False):
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...] = ()


class _PlainAdmission(msgspec.Struct, tag_field="type", tag="admitted", forbid_unknown_fields=True, gc=False):
    prompt_tokens: int


_decoder: Final = msgspec.json.Decoder(_Piece)
_BEGINS: Final = b'{"type":"delta"'
_admissions: Final = msgspec.json.Decoder(_PlainAdmission)
_ADMITS: Final = b'{"type":"admitted"'
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(slots=True)
class EventLines:
    """Reads the lines of one answer."""

    is_plain: bool = False
    """Whether its text is nothing but text. Where thoughts or calls are looked for in it, every piece stays by itself:
    their tokens are counted by the piece, and arguments of calls are told by the piece."""

    def events(self, lines: Sequence[bytes]) -> Iterator[Event | Refused]:
        """What the next lines say, in order.

        Raises pydantic's ValidationError at a line that can't be read, behind all before it.
        """
        texts: list[str] = []
        token_ids: list[int] = []
        for line in lines:
            if self.is_plain and (piece := _plain(line)) is not None:
                texts.append(piece.text)
                token_ids += piece.token_ids
                continue
            if texts:
                yield _delta(texts, token_ids)
                texts, token_ids = [], []
            event = _admission(line) or _LINES.validator.validate_json(line)
            if isinstance(event, Admitted):
                self.is_plain = event.thoughts is None and event.tool_call_format is None
            yield event
        if texts:
            yield _delta(texts, token_ids)


def plain_text(lines: Sequence[bytes]) -> tuple[str, tuple[int, ...]] | None:
    """Text and tokens of lines that are all pieces of an answer that is plain; None where one of them is not."""
    # The last is what most often isn't: an answer's end. And without its type a lone line would pass as a piece.
    if not lines[-1].startswith(_BEGINS):
        return None
    if len(lines) == 1:  # a token, at nearly all times
        try:
            only = _decoder.decode(lines[0])
        except _UNREADABLE:
            return None
        return None if only.logprobs else (only.text, only.token_ids)
    pieces = [piece for piece in map(_plain, lines) if piece is not None]
    if len(pieces) < len(lines):
        return None
    return "".join(piece.text for piece in pieces), tuple(one for piece in pieces for one in piece.token_ids)


def _plain(line: bytes) -> _Piece | None:
    if not line.startswith(_BEGINS):
        return None
    try:
        piece = _decoder.decode(line)
    except _UNREADABLE:
        return None
    return None if piece.logprobs else piece


def _admission(line: bytes) -> Admitted | None:
    """What nearly all admissions say; None where the line is none, or says more. A first token waits for its reading:
    nothing of the other way is in the processor's caches then."""
    if not line.startswith(_ADMITS):
        return None
    try:
        return Admitted(prompt_tokens=_admissions.decode(line).prompt_tokens)
    except _UNREADABLE:
        return None


def _delta(texts: list[str], token_ids: list[int]) -> Delta:
    return Delta(text="".join(texts), token_ids=tuple(token_ids))
