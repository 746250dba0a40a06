"""A vLLM worker's account of its time and steps, published at each change by `worker_state`.

The clock is always in exactly one state. A change closes one state and begins the next at the same reading of the
host's clock, so the states sum to wall time. A wait between two steps is `starved` while the worker knows of
unfinished requests in the scheduler, `idle` otherwise. Calls may come from one thread at a time; a change detected
later (a device's event) is entered with its own time.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from stageline_vllm.worker_state import (
    BUSY_STATES,
    STEP_BOUNDS,
    Counters,
    Life,
    Operation,
    State,
    WorkerPhase,
)

MAX_MARKS: Final = 24
"""Marks kept of one step; a worker that changes state more often without a step forgets the oldest."""


class Mark(NamedTuple):
    """From `at_nanoseconds` on the worker was in `state`, until the next mark."""

    state: State
    operation: Operation
    at_nanoseconds: int


class Step(NamedTuple):
    """One finished step. Its marks begin where the step before it ended: steps tile the worker's time."""

    seq: int
    kind: State
    rows: int
    tokens: int
    marks: tuple[Mark, ...]
    end_nanoseconds: int


class Publisher(Protocol):
    """Receives the account: `WorkerStateWriter`, or a list in tests."""

    def publish_life(self, life: Life) -> None: ...

    def publish_clock(
        self,
        started_nanoseconds: int,
        since_nanoseconds: int,
        state: State,
        operation: Operation,
        steps: tuple[int, int, int],
        spent_nanoseconds: Sequence[int],
    ) -> None: ...

    def publish_counters(self, counters: Counters) -> None: ...


class WorkerClock:
    def __init__(
        self,
        publisher: Publisher,
        *,
        stage: int,
        rank: int = 0,
        now_nanoseconds: Callable[[], int] = time.monotonic_ns,
        step_done: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        self._publisher = publisher
        self._now = now_nanoseconds
        self._step_done = step_done
        self._started = self._since = now_nanoseconds()
        self._state, self._operation = State.IDLE, Operation.NONE
        self._spent = [0] * len(State)
        self._marks = [Mark(State.IDLE, Operation.NONE, self._started)]
        self._step: tuple[State, int, int] | None = None
        self._begun = self._done = 0
        self._unfinished = 0
        self._steps, self._tokens, self._busy = ([0] * len(BUSY_STATES) for _ in range(3))
        self._buckets = [[0] * (len(STEP_BOUNDS) + 1) for _ in BUSY_STATES]
        self._hidden_bytes = self._kv_tokens = 0
        self._life = Life(pid=os.getpid(), stage=stage, rank=rank, phase=WorkerPhase.STARTING)
        publisher.publish_life(self._life)
        publisher.publish_counters(Counters())
        self._publish_clock()

    @property
    def state(self) -> State:
        return self._state

    @property
    def operation(self) -> Operation:
        return self._operation

    @property
    def life(self) -> Life:
        return self._life

    def live(self, life: Life) -> None:
        """Something of the worker's life has changed: `clock.live(replace(clock.life, phase=…))`."""
        self._life = life
        self._publisher.publish_life(life)

    def enter_phase(self, phase: WorkerPhase) -> None:
        self.live(replace(self._life, phase=phase))

    def fail(self, message: str) -> None:
        """An exception has left a call of the worker."""
        self.live(replace(self._life, message=message))

    def enter(self, state: State, operation: Operation = Operation.NONE, at_nanoseconds: int | None = None) -> None:
        """Close the running state and begin `state`; a moment before the last change counts from that on."""
        self._change(state, operation, at_nanoseconds)
        self._publish_clock()

    def _change(self, state: State, operation: Operation, at_nanoseconds: int | None) -> None:
        at = self._now() if at_nanoseconds is None else max(at_nanoseconds, self._since)
        self._spent[self._state] += at - self._since
        self._since = at
        if state is not self._state or operation is not self._operation:
            self._state, self._operation = state, operation
            marks = self._marks
            if len(marks) >= MAX_MARKS:
                del marks[0]
            marks.append(Mark(state, operation, at))

    def wait_for_scheduler(self, at_nanoseconds: int | None = None) -> None:
        """No work until the scheduler calls; ends an open step."""
        self._change(State.STARVED if self._unfinished else State.IDLE, Operation.NONE, at_nanoseconds)
        if self._step is None:
            self._publish_clock()
        else:
            self.end_step()

    def begin_step(self, kind: State, *, rows: int, tokens: int, unfinished_requests: int) -> None:
        """The scheduler has sent a step with tokens.

        Ends a step that is still open. Published with the change of state that follows.
        """
        self.end_step()
        self._step = (kind, rows, tokens)
        self._begun += 1
        self._unfinished = unfinished_requests

    def note_unfinished(self, requests: int, kv_tokens: int = 0) -> None:
        """The scheduler reported without a step how many requests are left, and how many of their tokens are held."""
        self._unfinished = requests
        self._kv_tokens = kv_tokens
        self._publish_counters()

    def note_sent(self, hidden_bytes: int) -> None:
        self._hidden_bytes += hidden_bytes

    def note_kv_tokens(self, tokens: int) -> None:
        self._kv_tokens = tokens

    def end_step(self) -> None:
        """End the open step at the last change of state; does nothing without one."""
        if self._step is None:
            return
        kind, rows, tokens = self._step
        self._step = None
        last = self._marks[-1]
        step = Step(self._begun, kind, rows, tokens, tuple(self._marks[:-1]), last.at_nanoseconds)
        self._marks = [last]
        self._done += 1
        self._count(step)
        self._publish_clock()
        self._step_done(step)

    def _count(self, step: Step) -> None:
        index, busy = BUSY_STATES.index(step.kind), busy_nanoseconds(step)
        self._steps[index] += 1
        self._tokens[index] += step.tokens
        self._busy[index] += busy
        self._buckets[index][bisect_left(STEP_BOUNDS, busy / 1e9)] += 1
        self._publish_counters()

    def _publish_counters(self) -> None:
        self._publisher.publish_counters(
            Counters(
                steps=tuple(self._steps),
                tokens=tuple(self._tokens),
                busy_nanoseconds=tuple(self._busy),
                step_seconds=tuple(map(tuple, self._buckets)),
                hidden_bytes_sent=self._hidden_bytes,
                kv_tokens=self._kv_tokens,
            )
        )

    def _publish_clock(self) -> None:
        counts = (self._begun, self._done, self._unfinished)
        self._publisher.publish_clock(self._started, self._since, self._state, self._operation, counts, self._spent)


def busy_nanoseconds(step: Step) -> int:
    """Time of compute in a step."""
    total, end = 0, step.end_nanoseconds
    for mark in reversed(step.marks):
        if mark.state in BUSY_STATES:
            total += end - mark.at_nanoseconds
        end = mark.at_nanoseconds
    return total
