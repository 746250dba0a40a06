"""Converts the workers' state files to the account that every stage exposes: status and `stageline_stage_*`.

The files are read on each request, so the seconds sum to wall time at that moment. Time before the first worker had
a clock counts as idle. Several workers of one stage (tensor parallel) run in step: the first one's clock represents
the stage, and the stage is ready when its last worker is.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stageline_api.health import StageStatus
from stageline_runtime.plan_bus.messages import PlanMoments
from stageline_runtime.stage.telemetry.metrics import BUBBLE_WINDOW_SECONDS, StageMetrics
from stageline_runtime.stage.telemetry.progress import BucketCounts, StageProgress
from stageline_runtime.stage.telemetry.state_clock import (
    IDLE,
    RECENT_STEPS,
    BusyKind,
    State,
    StateClock,
    StepRecord,
    Timeline,
    WaitReason,
    moments_of,
)
from stageline_vllm.step_ring import StepRingReader, step_ring_path
from stageline_vllm.supervisor.outcome import WorkerFailure
from stageline_vllm.worker_clock import Step
from stageline_vllm.worker_state import (
    BUSY_STATES,
    STEP_BOUNDS,
    WAIT_STATES,
    WorkerPhase,
    WorkerState,
    WorkerStateError,
    WorkerStateReader,
    worker_state_path,
)
from stageline_vllm.worker_state import State as WorkerActivity

_STATES: Final[dict[WorkerActivity, State]] = {
    WorkerActivity.IDLE: IDLE,
    **{state: BusyKind(state.name.lower()) for state in BUSY_STATES},
    **{state: WaitReason(state.name.lower()) for state in WAIT_STATES},
}


class Workers:
    """Readers of one stage's workers."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self._readers = [WorkerStateReader(worker_state_path(directory, rank)) for rank in range(count)]

    def states(self) -> dict[int, WorkerState]:
        """By rank, for workers that have published a state; an unreadable file is omitted."""
        found: dict[int, WorkerState] = {}
        for rank, reader in enumerate(self._readers):
            try:
                state = reader.read()
            except WorkerStateError:
                continue
            if state is not None:
                found[rank] = state
        return found

    def first(self) -> WorkerState | None:
        return self.states().get(0)

    def phase(self) -> WorkerPhase | None:
        """The least advanced phase of the workers; None until all have begun."""
        states = self.states()
        if len(states) < len(self._readers):
            return None
        return min(state.life.phase for state in states.values())

    def failures(self) -> list[WorkerFailure]:
        """The exceptions that they have written down."""
        is_one_of_many = len(self._readers) > 1
        return [
            WorkerFailure(
                worker=f"vLLM's worker {rank}" if is_one_of_many else "vLLM's worker",
                words=" ".join(state.life.message.split()),
                phase=state.life.phase,
            )
            for rank, state in self.states().items()
            if state.life.message
        ]


class WorkerClockView(StateClock):
    """The worker's clock, seen from outside."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(time.monotonic_ns)
        self._workers = workers

    def reading(self) -> tuple[dict[State, float], float]:
        """Seconds by state as the worker counts them, and wall seconds since the supervisor began by its own clock."""
        worker, now = self._workers.first(), self._now()
        wall = (now - self._started) / 1e9
        if worker is None:
            return {IDLE: wall}, wall
        before = max(0, worker.clock.started_nanoseconds - self._started)
        spent = {_STATES[state]: value / 1e9 for state, value in worker.clock.spent_at(now).items()}
        spent[IDLE] = spent.get(IDLE, 0.0) + before / 1e9
        return spent, wall


class WorkerTimeline(Timeline):
    """The worker's last steps from its ring; the bubble ratio of the last seconds from readings of the clock."""

    def __init__(self, clock: StateClock, steps: StepRingReader, workers: Workers) -> None:
        super().__init__(ring_steps=1)
        self._clock = clock
        self._steps = steps
        self._workers = workers
        self._readings: deque[tuple[int, dict[State, float]]] = deque()

    def note(self) -> None:
        """Called about once a second."""
        now = self._clock.now_nanoseconds()
        self._readings.append((now, self._clock.reading()[0]))
        while len(self._readings) > 2 and now - self._readings[1][0] >= BUBBLE_WINDOW_SECONDS * 10**9:
            self._readings.popleft()

    def records(self) -> list[StepRecord]:
        """The steps kept, oldest first. For any thread."""
        return [_record(step) for step in self._steps.steps()]

    def recent_moments(self) -> tuple[PlanMoments, ...]:
        """When the newest steps were received and sent. Called once a second, so it reads only those."""
        worker = self._workers.first()
        done = 0 if worker is None else worker.clock.steps_done
        return tuple(moments_of(_record(step)) for step in self._steps.steps_until(done, RECENT_STEPS))

    def seconds_since(self, begin_nanoseconds: int, now_nanoseconds: int) -> dict[State, float]:
        """Seconds in each state since the oldest reading that is kept, which is about `begin`."""
        del begin_nanoseconds, now_nanoseconds
        if not self._readings:
            return {}
        earlier = self._readings[0][1]
        return {state: value - earlier.get(state, 0.0) for state, value in self._clock.reading()[0].items()}


def _record(step: Step) -> StepRecord:
    """A step of vLLM as a plan of the own runtime: it has no cohort and returns no feedback of its own."""
    marks = tuple((_STATES[mark.state], mark.operation.wire_name, mark.at_nanoseconds) for mark in step.marks)
    kind = BusyKind(step.kind.name.lower())
    return StepRecord(step.seq, 0, kind, step.rows, step.tokens, -1, marks, step.end_nanoseconds)


class _Buckets(BucketCounts):
    """A histogram as the worker has counted it."""

    def set(self, counts: tuple[int, ...], total_nanoseconds: int) -> None:
        self._counts, self._sum = list(counts), total_nanoseconds / 1e9


@dataclass(kw_only=True)
class WorkerProgress(StageProgress):
    """The stage's account, from files read on each call."""

    workers: Workers

    def refresh(self) -> None:
        """Bring what the first worker counts into the account. For any thread."""
        worker = self.workers.first()
        if worker is None:
            return
        counters, life = worker.counters, worker.life
        self.steps = worker.clock.steps_done
        self.memory_bytes = life.memory_bytes
        self.num_slots = life.kv_blocks
        self.kv_capacity_tokens = life.kv_capacity_tokens
        self.hidden_bytes_sent = counters.hidden_bytes_sent
        self.occupancy.tokens = counters.kv_tokens
        for index, state in enumerate(BUSY_STATES):
            kind = BusyKind(state.name.lower())
            self.steps_by_kind[kind] = counters.steps[index]
            self.tokens_by_kind[kind] = counters.tokens[index]
            buckets = self.step_seconds_by_kind[kind]
            assert isinstance(buckets, _Buckets), "made by account_of"
            buckets.set(counters.step_seconds[index], counters.busy_nanoseconds[index])

    def status(self) -> StageStatus:
        self.refresh()
        return super().status()


class FreshMetrics(StageMetrics):
    """The metrics page, from files read on each call."""

    def __init__(self, progress: WorkerProgress, model_name: str) -> None:
        super().__init__(progress, model_name)
        self._account = progress

    def page(self, accept: str = "") -> tuple[bytes, str]:
        self._account.refresh()
        return super().page(accept)


def account_of(workers: Workers, *, stage: int, stage_count: int, incarnation: int) -> WorkerProgress:
    clock = WorkerClockView(workers)
    buckets: dict[BusyKind, BucketCounts] = {kind: _Buckets(STEP_BOUNDS) for kind in BusyKind}
    return WorkerProgress(
        stage=stage,
        stage_count=stage_count,
        incarnation=incarnation,
        clock=clock,
        timeline=WorkerTimeline(clock, StepRingReader(step_ring_path(workers.directory, 0)), workers),
        step_seconds_by_kind=buckets,
        workers=workers,
    )
