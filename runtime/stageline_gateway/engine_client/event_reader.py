"""Lines of one run to its events: text that is nothing but text by a short way, everything else checked for its order.

Text goes on at once and is accounted for later, many pieces together, where its taker lets accounts wait; always before
the next event, and before anybody is told of the run's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import assert_never

from pydantic import ValidationError

from stageline_api.engine_http import Admitted, Delta, Event, Failed, Finished, FinishReason, PromptTokens
from stageline_api.multiplexing import Refused
from stageline_gateway.engine_client.event_lines import EventLines, plain_text
from stageline_gateway.engine_client.incoming_lines import IncomingLines, Pause
from stageline_gateway.engine_client.late_accounts import LateAccounts
from stageline_gateway.engine_client.run_events import (
    AnswerFailedError,
    EngineEvent,
    EngineLostError,
    EngineRefusedError,
    LossKind,
    TakeEvents,
    TextTaker,
    WrittenTexts,
)
from stageline_gateway.engine_trust import EngineAddress


@dataclass(slots=True)
class _Order:
    """Checks the order of a stream's events: Admitted first and once, nothing after the end."""

    admitted: bool = False
    finished: bool = False
    is_over: bool = False
    """Whether the engine said its last word on it, whatever that was."""

    def check(self, event: Event | Refused) -> EngineEvent:
        if isinstance(event, Delta) and self.admitted and not self.finished:
            return event
        begins = isinstance(event, Admitted | Refused)
        if self.finished or (begins == self.admitted and not isinstance(event, Failed)):
            raise EngineLostError(LossKind.PROTOCOL, f"The engine sent '{event.type}' out of order.")
        self.is_over = isinstance(event, Refused | Failed | Finished)
        match event:
            case Admitted():
                self.admitted = True
            case Refused(error=error):
                raise EngineRefusedError(error)
            case Failed(is_final=True):
                raise AnswerFailedError(event.message)
            case Failed():
                kind = LossKind.HUNG if event.is_suspect else LossKind.ENGINE_FAILED
                message = f"The engine could not finish the answer: {event.message}"
                raise EngineLostError(kind, message, had_no_part=event.was_waiting)
            case Finished(reason=FinishReason.ABORT):
                raise EngineLostError(LossKind.ABORTED, "The engine aborted the request.")
            case Finished():
                self.finished = True
            case Delta() | PromptTokens():
                pass
            case _:
                assert_never(event)
        return event


@dataclass(slots=True)
class EventReader:
    """Lines to events of one run. A line that is no event, or out of order, fails it behind those before it."""

    take: TakeEvents
    texts: TextTaker | None
    """Takes text by itself, once an answer has begun."""
    limit_seconds: float
    """How long the engine may be silent now."""
    stall_seconds: float
    """And between two pieces of an answer."""
    engine: EngineAddress
    late: LateAccounts
    order: _Order = field(default_factory=_Order)
    lines: EventLines = field(default_factory=EventLines)
    _source: IncomingLines | None = None
    _write: Callable[[str], Pause | None] | None = None
    """Writes text, while the next that comes is most likely text and nothing else, for which nothing else is to be
    done."""
    _unaccounted: list[float | int] = field(default_factory=list)
    """Of each text when it came, a float, and behind it its tokens: one short list, to which little is added for a
    token, and nothing else of the text is kept."""
    _characters: int = 0
    """Of the same texts."""
    _may_wait: bool = False
    """Whether accounts of text may."""

    def __post_init__(self) -> None:
        self._may_wait = self.texts is not None and self.texts.may_wait

    async def read_all(self, source: IncomingLines) -> None:
        """Until the answer's end, or the source's."""
        self._source = source
        await source.relay(self.read, self.limit_seconds)

    def read(self, lines: list[bytes]) -> Pause | None:
        if (write := self._write) is not None and (told := plain_text(lines)) is not None:
            text, token_ids = told
            if not self._unaccounted and self._may_wait:
                self.late.add(self.engine, self.account)
            self._unaccounted.append(monotonic())
            self._unaccounted += token_ids
            self._characters += len(text)
            pause = write(text)
            if not self._may_wait:
                self.account()
            return pause
        return self._read_events(lines)

    def account(self) -> None:
        """Have all text accounted for that was written."""
        if self._unaccounted and self.texts is not None:
            written = _told_apart(self._unaccounted, self._characters)
            self._unaccounted, self._characters = [], 0
            self.texts.account(written)

    def close(self) -> None:
        """Nothing more is read."""
        self.account()
        self.late.discard(self.engine, self.account)

    def _read_events(self, lines: list[bytes]) -> Pause | None:
        assert self._source is not None, "read without a source"
        self.account()
        events: list[EngineEvent] = []
        try:
            for found in self.lines.events(lines):
                event = self.order.check(found)
                events.append(event)
                if isinstance(event, Delta) and self.limit_seconds != self.stall_seconds:
                    self.limit_seconds = self.stall_seconds
                    self._source.allow_silence(self.stall_seconds)
                is_steady = self.lines.is_plain and isinstance(event, Delta) and not event.logprobs
                self._write = self.texts.write if is_steady and self.texts is not None else None
                if self.order.finished:
                    break  # whatever an engine says behind that, in this read or another, is nobody's any more
        except ValidationError:
            lost = EngineLostError(LossKind.PROTOCOL, "The engine sent an event that can't be read.")
            return self._fail_behind(events, lost)
        except Exception as error:
            return self._fail_behind(events, error)
        if self.order.finished:
            self._source.stop()
        return self.take(events)

    def _fail_behind(self, events: list[EngineEvent], error: Exception) -> Pause:
        if isinstance(error, EngineLostError | EngineRefusedError | AnswerFailedError):
            error = error.with_traceback(None)  # nobody may come to raise it
        return partial(_fail_after, self.take(events) if events else None, [error])


async def _fail_after(pause: Pause | None, failures: list[Exception]) -> None:
    """Raise the one failure there is. It is taken out of the list, since a frame that holds what was raised through it
    is freed by nobody but the garbage collector."""
    if pause is not None:
        await pause()
    raise failures.pop()


def _told_apart(unaccounted: Sequence[float | int], characters: int) -> WrittenTexts:
    """The texts that a reader noted: each of them a float, and its tokens behind it."""
    begins = [place for place, one in enumerate(unaccounted) if isinstance(one, float)]
    ends = [*begins[1:], len(unaccounted)]
    stamps = [(unaccounted[begin], end - begin - 1) for begin, end in zip(begins, ends, strict=True)]
    return WrittenTexts(stamps, [one for one in unaccounted if isinstance(one, int)], characters)
