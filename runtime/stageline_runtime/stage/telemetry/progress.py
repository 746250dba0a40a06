"""What a stage tells about itself: phase, loading, layers, counters, what lies in its KV cache.

Written by the main thread, read by others. Each field is replaced whole (never mutated in place), so a reader sees old
or new, not half. Counting a step takes no lock: prometheus_client's own histogram takes one and several microseconds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stageline_api.health import Phase, StageStatus
from stageline_api.runtime_config import LayerRange
from stageline_api.telemetry import metric_buckets
from stageline_api.telemetry.timeline import TimelinePage
from stageline_runtime.plan_bus.messages import GraphMode, StepPlan
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, rank_of_slot
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
    """Blocks of the KV cache that slots use, worked out from the plans that the stage runs: one that several share is
    one. What is cached beside them, for requests to come, is the engine's to tell (`stageline_kv_blocks`).
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """`num_ranks`: that have slots, and so blocks, of their own."""
        self._num_ranks = num_ranks
        self._tables: dict[int, tuple[int, ...]] = {}
        self._uses: Counter[tuple[int, int]] = Counter()
        self.tokens = 0
        """Positions of all these blocks."""

    def note(self, plan: StepPlan) -> None:
        """A plan has been run."""
        for change in plan.tables:
            before = self._tables.get(change.slot, ())
            self._tables[change.slot] = (*before[: change.start], *change.blocks)
            rank = rank_of_slot(change.slot, self._num_ranks)
            self._uses.update((rank, block) for block in change.blocks)
            for block in before[change.start :]:
                self._uses[rank, block] -= 1
                if not self._uses[rank, block]:
                    del self._uses[rank, block]
        self.tokens = len(self._uses) * BLOCK_TOKENS


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
    lacks_native_kernels: bool = False
    """Whether torch's own operators compute layers that compiled kernels would."""
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

    def count_step(self, plan: StepPlan, kind: BusyKind, *, drafted: bool = False) -> StepRecord:
        """A plan has been run and what it made was sent. Heartbeats count as no kind.

        `drafted`: its draft steps were run here, as they are by the last stage's ranks that have a row to draft for.
        """
        self.steps += 1
        self.occupancy.note(plan)
        record = self.timeline.end_step(plan, None if plan.is_heartbeat else kind)
        if self.stage < self.stage_count - 1:
            self.hidden_bytes_sent += plan.padded_tokens * self.hidden_token_bytes
        elif plan.feedback_posted and self.stage_count > 1:
            self.feedback_bytes_sent += len(plan.sampled_rows) * self.feedback_row_bytes
        if not plan.is_heartbeat:
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
