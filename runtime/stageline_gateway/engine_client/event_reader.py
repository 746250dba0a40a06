"""The lines of one run as events: each checked for its order, pieces of text that came together put together.

A line that is no event, or out of order, fails the run behind the events before it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import assert_never

from stageline_api.engine_http import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptTokens,
    Refused,
    UnreadableError,
    read_event,
)
from stageline_gateway.engine_client.incoming_lines import IncomingLines, Pause
from stageline_gateway.engine_client.run_events import (
    AnswerFailedError,
    EngineEvent,
    EngineLostError,
    EngineRefusedError,
    LossKind,
    TakeEvents,
)

_FAILURES = (EngineLostError, EngineRefusedError, AnswerFailedError)


class EventReader:
    """Gives the events of one run to `take`."""

    def __init__(self, take: TakeEvents, idle_seconds: float, stall_seconds: float) -> None:
        """The engine may be silent for `idle_seconds`, and for `stall_seconds` once it generates."""
        self._take = take
        self.limit_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self._source: IncomingLines | None = None
        self._is_admitted = False
        self._is_plain = False
        """Whether the text is plain text. If it is parsed for reasoning or tool calls, chunks are not merged: their
        tokens are counted per chunk, and tool call arguments are streamed per chunk."""
        self.is_finished = False
        self.is_over = False
        """Whether the engine has sent its last event, whatever that was."""

    async def read_all(self, source: IncomingLines) -> None:
        """Until the answer's end, or the source's."""
        self._source = source
        await source.relay(self._read, self.limit_seconds)

    def _read(self, lines: Sequence[bytes]) -> Pause | None:
        events: list[EngineEvent] = []
        failure: Exception | None = None
        for line in lines:
            if self.is_finished:
                break  # later lines from the engine are ignored
            try:
                events.append(self._checked(read_event(line)))
            except UnreadableError:
                failure = EngineLostError(LossKind.PROTOCOL, "The engine sent an event that can't be read.")
                break
            except _FAILURES as error:
                failure = error.with_traceback(None)  # it may never be raised
                break
        told = list(_joined(events)) if self._is_plain and len(events) > 1 else events
        if failure is not None:
            return partial(_fail_after, self._take(told) if told else None, [failure])
        if self.is_finished and self._source is not None:
            self._source.stop()
        return self._take(told)

    def _checked(self, event: Event) -> EngineEvent:
        """`event` where it is in order: Admitted first and once, nothing after the end."""
        begins = isinstance(event, Admitted | Refused)
        if begins == self._is_admitted and not isinstance(event, Failed):
            name = type(event).__struct_config__.tag
            raise EngineLostError(LossKind.PROTOCOL, f"The engine sent '{name}' out of order.")
        match event:
            case Delta():
                self._allow_silence()
            case PromptTokens():
                pass
            case Admitted():
                self._is_admitted = True
                self._is_plain = event.thoughts is None and event.tool_call_format is None
            case Finished():
                self.is_over = True
                if event.reason is FinishReason.ABORT:
                    raise EngineLostError(LossKind.ABORTED, "The engine aborted the request.")
                self.is_finished = True
            case Refused() | Failed():
                self.is_over = True
                raise _failure(event)
            case _:
                assert_never(event)
        return event

    def _allow_silence(self) -> None:
        """From now on the engine generates."""
        if self.limit_seconds != self._stall_seconds and self._source is not None:
            self.limit_seconds = self._stall_seconds
            self._source.allow_silence(self._stall_seconds)


def _failure(event: Refused | Failed) -> Exception:
    if isinstance(event, Refused):
        return EngineRefusedError(event.error)
    if event.is_final:
        return AnswerFailedError(event.message)
    kind = LossKind.HUNG if event.is_suspect else LossKind.ENGINE_FAILED
    message = f"The engine could not finish the answer: {event.message}"
    return EngineLostError(kind, message, had_no_part=event.was_waiting)


def _joined(events: Sequence[EngineEvent]) -> Iterator[EngineEvent]:
    """`events` with one Delta for those that follow each other: no client would have had the first of them sooner."""
    for is_text, group in groupby(events, lambda event: isinstance(event, Delta) and not event.logprobs):
        if not is_text:
            yield from group
            continue
        deltas = [event for event in group if isinstance(event, Delta)]
        ids = tuple(index for delta in deltas for index in delta.token_ids)
        yield Delta(text="".join(delta.text for delta in deltas), token_ids=ids)


async def _fail_after(pause: Pause | None, failures: list[Exception]) -> None:
    """Raise the only failure. It is removed from the list first: otherwise the traceback's frame refers to it, and only
    the garbage collector would free both."""
    if pause is not None:
        await pause()
    raise failures.pop()
