"""What a stage tells about itself: phase, loading, layers, counters, what lies in its KV cache.

Written by the main thread, read by others. Each field is replaced whole (never mutated in place), so a reader sees old
or new, not half. Counting a step takes no lock: prometheus_client's own histogram takes one and several microseconds.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stageline_api.health import Phase, StageStatus
from stageline_api.runtime_config import LayerRange
from stageline_api.telemetry import metric_buckets
from stageline_api.telemetry.timeline import TimelinePage
from stageline_runtime.plan_bus.messages import GraphMode, StepPlan
from stageline_runtime.ranks.exchange_times import ExchangeTimes
from stageline_runtime.stage.telemetry.state_clock import BusyKind, StateClock, StepRecord, Timeline

STARTUP_PHASES: Final = (Phase.STARTING, Phase.CONNECTING, Phase.LOADING, Phase.RENDEZVOUS, Phase.WARMING)
"""Those before a stage is ready."""


class BucketCounts:
    """Counts of a histogram, kept by one thread: an observation is a bisection and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value. By the owner's thread only."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(bound, number of values up to it) for each bound and `+Inf`, and the sum of all. For any thread."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        counts, value_sum = self._counts[:], self._sum
        for bound, count in zip((*map(repr, map(float, self._bounds)), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, value_sum


class KvOccupancy:
    """Tokens whose keys and values lie in the slots, worked out from the plans that the stage runs.

    A stage is not told when a request ends, so an ended request's tokens count until its slot is given out again: this
    is what lies in the cache, not what is reserved (the engine's `kv_cache_usage_ratio`).
    """

    def __init__(self) -> None:
        self._tokens_of_slot: dict[int, int] = {}
        self.tokens = 0
        """All slots together."""

    def note(self, plan: StepPlan) -> None:
        """A plan has been run: its trims and fills kept the beginnings of slots, and its rows wrote behind these."""
        for trim in plan.trims:
            self._set(trim.slot, min(trim.num_tokens, self._tokens_of_slot.get(trim.slot, 0)))
        for fill in plan.fills:
            self._set(fill.slot, fill.cached_tokens)
        for row in plan.rows:
            self._set(row.slot, row.position + row.num_tokens)

    def _set(self, slot: int, tokens: int) -> None:
        self.tokens += tokens - self._tokens_of_slot.get(slot, 0)
        self._tokens_of_slot[slot] = tokens


@dataclass(slots=True, kw_only=True)
class StageProgress:
    stage: int
    stage_count: int
    incarnation: int
    clock: StateClock
    timeline: Timeline
    phase: Phase = Phase.STARTING
    message: str = ""
    layers: LayerRange | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    memory_bytes: int = 0
    num_slots: int = 0
    kv_capacity_tokens: int = 0
    """What all slots together may hold."""
    occupancy: KvOccupancy = field(default_factory=KvOccupancy)
    hidden_token_bytes: int = 0
    """Bytes of one padded token's hidden state, as the stage's ranks send it to the next: together one, or each its own
    where their requests differ."""
    feedback_row_bytes: int = 0
    """Bytes of one sampled row, as the last stage sends it to the first."""
    steps_by_kind: dict[BusyKind, int] = field(default_factory=lambda: dict.fromkeys(BusyKind, 0))
    tokens_by_kind: dict[BusyKind, int] = field(default_factory=lambda: dict.fromkeys(BusyKind, 0))
    step_seconds_by_kind: dict[BusyKind, BucketCounts] = field(
        default_factory=lambda: {kind: BucketCounts(metric_buckets.STEP) for kind in BusyKind}
    )
    steps_by_graph_mode: dict[GraphMode, int] = field(default_factory=lambda: dict.fromkeys(GraphMode, 0))
    hidden_bytes_sent: int = 0
    feedback_bytes_sent: int = 0
    steps: int = 0
    is_rank: bool = False
    """Whether the stage has other ranks beside this one."""
    exchanges: ExchangeTimes | None = None
    """With them."""

    startup_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """What was spent in each phase that was left before it was ready."""
    entered_nanoseconds: int = field(init=False)
    """When this phase began, by the clock."""

    def __post_init__(self) -> None:
        self.entered_nanoseconds = self.clock.now_nanoseconds()

    def enter(self, phase: Phase, message: str = "") -> None:
        if phase is not self.phase:
            now = self.clock.now_nanoseconds()
            if self.phase in STARTUP_PHASES:
                spent = self.startup_seconds.get(self.phase, 0.0) + (now - self.entered_nanoseconds) / 1e9
                self.startup_seconds = {**self.startup_seconds, self.phase: spent}
            self.entered_nanoseconds = now
        self.phase = phase
        self.message = message

    def loading(self, loaded_bytes: int, total_bytes: int) -> None:
        self.loaded_bytes, self.total_bytes = loaded_bytes, total_bytes

    def count_step(
        self, plan: StepPlan, kind: BusyKind, *, cancelled: bool = False, dead: bool = False, drafted: bool = False
    ) -> StepRecord:
        """A plan has been run and what it made was sent. Heartbeats and cancelled plans count as no kind.

        `dead`: what was sampled for it counts for nobody, as far as this stage knows. `drafted`: its draft steps were
        run here, as they are by the last stage's ranks that have a row to draft for.
        """
        self.steps += 1
        self.occupancy.note(plan)
        is_computed = not plan.is_heartbeat and not cancelled
        record = self.timeline.end_step(plan, kind if is_computed else None, dead=dead or cancelled)
        if self.stage < self.stage_count - 1:
            self.hidden_bytes_sent += plan.padded_tokens * self.hidden_token_bytes
        elif plan.feedback_posted and self.stage_count > 1:
            self.feedback_bytes_sent += len(plan.sampled_rows) * self.feedback_row_bytes
        if is_computed:
            self.steps_by_kind[kind] += 1
            self.steps_by_graph_mode[plan.graph_mode] += 1
            self.tokens_by_kind[kind] += record.tokens
            self.step_seconds_by_kind[kind].observe(record.busy_nanoseconds() / 1e9)
        if drafted:
            self._count_drafts(plan, record)
        return record

    def _count_drafts(self, plan: StepPlan, record: StepRecord) -> None:
        self.steps_by_kind[BusyKind.DRAFT] += plan.draft_steps
        self.step_seconds_by_kind[BusyKind.DRAFT].observe(record.draft_nanoseconds() / 1e9)

    def timeline_page(self, since_seq: int) -> TimelinePage:
        """The steps after plan `since_seq`, as many as one answer holds."""
        return self.timeline.page(
            since_seq,
            stage=self.stage,
            stage_count=self.stage_count,
            incarnation=self.incarnation,
            now=self.clock.now_nanoseconds(),
        )

    def status(self) -> StageStatus:
        return StageStatus(
            phase=self.phase,
            stage=self.stage,
            stage_count=self.stage_count,
            incarnation=self.incarnation,
            layers=self.layers,
            loaded_bytes=self.loaded_bytes,
            total_bytes=self.total_bytes,
            memory_bytes=self.memory_bytes,
            steps=self.steps,
            message=self.message,
        )
