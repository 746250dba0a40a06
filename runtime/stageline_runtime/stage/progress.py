"""What a stage tells about itself: phase, loading, layers, counters. Written by the main thread, read by others.

Each field is replaced whole (never mutated in place), so a reader sees old or new, not half.
"""

from dataclasses import dataclass, field

from stageline_api.health import Phase, StageStatus
from stageline_api.runtime_config import LayerRange
from stageline_runtime.messages import StepPlan
from stageline_runtime.stage.clock import BusyKind, StateClock


@dataclass(slots=True, kw_only=True)
class StageProgress:
    """The stage's account of itself."""

    stage: int
    stage_count: int
    incarnation: int
    clock: StateClock
    phase: Phase = Phase.STARTING
    message: str = ""
    layers: LayerRange | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    memory_bytes: int = 0
    num_slots: int = 0
    steps_by_kind: dict[BusyKind, int] = field(default_factory=lambda: dict.fromkeys(BusyKind, 0))
    tokens_by_kind: dict[BusyKind, int] = field(default_factory=lambda: dict.fromkeys(BusyKind, 0))
    steps: int = 0

    def enter(self, phase: Phase, message: str = "") -> None:
        """Begin a phase of the stage's life."""
        self.phase = phase
        self.message = message

    def loading(self, loaded_bytes: int, total_bytes: int) -> None:
        """Bytes of weights read so far."""
        self.loaded_bytes, self.total_bytes = loaded_bytes, total_bytes

    def count_step(self, plan: StepPlan, kind: BusyKind) -> None:
        """A plan has been run. Heartbeats compute nothing and count as no kind."""
        self.steps += 1
        if not plan.is_heartbeat:
            self.steps_by_kind[kind] += 1
            self.tokens_by_kind[kind] += plan.num_tokens

    def status(self) -> StageStatus:
        """The public form."""
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
