"""What is remembered of one request whose trace is kept, until its spans are made. Pure.

Written on the engine's event loop at the few moments of a request's life (it comes, gets a slot, ends), and for each
plan until its first decode; never for a token. When its tokens came is read from what the metrics time anyway.
"""

from dataclasses import dataclass, field
from typing import Final

from stageline_api.engine_http import FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.telemetry.request_metrics import RequestTimes
from stageline_runtime.plan_bus.messages import PlanRow, StepTimes

MAX_PREFILL_PLANS: Final = 8
"""Plans of a request's prompt that its stages are asked about: the first ones."""
MAX_STAGE_SPANS: Final = 64
"""Of one request's prefill, however many stages there are; those of its first decode come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAnchor:
    """Readings of three clocks at one moment: what the engine times with, told as wall time."""

    wall_nanoseconds: int
    performance_nanoseconds: int
    """Of `time.perf_counter_ns`, with which the stages' clocks are compared."""
    monotonic_seconds: float
    """Of `time.monotonic`, with which requests are timed."""

    def of_performance(self, nanoseconds: int) -> int:
        """Wall time in nanoseconds."""
        return self.wall_nanoseconds + nanoseconds - self.performance_nanoseconds

    def of_monotonic(self, seconds: float) -> int:
        """Wall time in nanoseconds."""
        return self.wall_nanoseconds + round((seconds - self.monotonic_seconds) * 1e9)


@dataclass(frozen=True, slots=True)
class Place:
    """The request has got a slot, and its first row there is planned."""

    slot: int
    cohort: int
    cached_tokens: int
    """Of its inputs, how many were found in the cache."""
    at_nanoseconds: int
    """By `time.perf_counter_ns`."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """One plan on one stage."""

    stage: int
    offset_nanoseconds: int
    """The stage's clock minus the engine's `time.perf_counter_ns`."""
    is_decode: bool
    """Whether the request's row in it was a decode; the plan may hold other kinds beside it."""
    times: StepTimes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended; `error` says what kept it from ending well, in a word for machines and in a sentence."""

    reason: FinishReason | None
    error: str = ""
    message: str = ""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request's."""

    span: object
    """OpenTelemetry's, begun when the request was submitted."""
    request: AdmittedRequest
    anchor: ClockAnchor
    """Taken when it was submitted."""
    times: RequestTimes
    prefill_plans: int
    """Plans of the prompt that the stages are still to be asked about."""
    places: list[Place] = field(default_factory=list)
    """The first, and one more after each preemption."""
    holder: tuple[int, int] | None = None
    """Slot and generation, while plans of it are looked for."""
    steps: list[StageStep] = field(default_factory=list)
    awaited: int = 0
    """Steps that stages have not told of yet."""
    outcome: Outcome | None = None
    """There when it has ended."""
    ended_nanoseconds: int = 0
    """By `time.perf_counter_ns`."""
    decode_planned: bool = False

    def wants(self, row: PlanRow) -> bool:
        """Whether the stages are to be asked about the plan with this row: the first chunks, the first decode."""
        if row.token_ids:
            self.prefill_plans -= 1
            return self.prefill_plans >= 0
        first, self.decode_planned = not self.decode_planned, True
        return first


def prefill_plans_of(stage_count: int) -> int:
    """How many plans of each request's prompt the stages are asked about."""
    return max(1, min(MAX_PREFILL_PLANS, MAX_STAGE_SPANS // stage_count))
