"""The record of one request with a kept trace, and the spans made from it when it has ended. Pure.

The engine's event loop writes it at the few moments of a request's life (arrival, slot, end), and for each plan
until its first decode; never for a token. Token times are read from the metrics' own measurements.

Spans are plain data here. Attributes have the names of OpenTelemetry's conventions for generative AI where there is
one, else `stageline.*`. They hold numbers, names and codes, never text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stageline_api.engine_http import FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.telemetry.metrics import RequestTimes
from stageline_runtime.plan_bus.messages import PlanRow, StepTimes

Attribute = str | bool | int | float | tuple[str, ...]

REQUEST: Final = "engine.request"
READ_PROMPT: Final = "engine.read_prompt"
QUEUE: Final = "engine.queue"
PREFILL: Final = "engine.prefill"
DECODE: Final = "engine.decode"
STAGE_STEP: Final = "stage.step"
FIRST_TOKEN: Final = "first token"
SLOT_AGAIN: Final = "slot again after preemption"
MAX_PREFILL_PLANS: Final = 8
"""Plans of a request's prompt that its stages are asked about: the first ones."""
MAX_STAGE_SPANS: Final = 64
"""Of one request's prefill, however many stages there are; those of its first decode come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAnchor:
    """Readings of three clocks at one moment, by which the engine's times become wall time."""

    wall_nanoseconds: int
    performance_nanoseconds: int
    """Of `time.perf_counter_ns`, with which the stages' clocks are compared."""
    monotonic_seconds: float
    """Of `time.monotonic`, with which requests are timed."""

    def of_performance(self, nanoseconds: int) -> int:
        return self.wall_nanoseconds + nanoseconds - self.performance_nanoseconds

    def of_monotonic(self, seconds: float) -> int:
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
    stage: int
    offset_nanoseconds: int
    """The stage's clock minus the engine's `time.perf_counter_ns`."""
    is_decode: bool
    """Whether the request's row in it was a decode; the plan may hold other kinds beside it."""
    times: StepTimes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended; `error` is the error as a code, `message` as a sentence."""

    reason: FinishReason | None
    error: str = ""
    message: str = ""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
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
    """Steps that stages have not reported yet."""
    outcome: Outcome | None = None
    """Set when it has ended."""
    ended_nanoseconds: int = 0
    """By `time.perf_counter_ns`."""
    decode_planned: bool = False

    def wants(self, row: PlanRow) -> bool:
        """Whether the stages are to be asked about the plan with this row: the first chunks, the first decode."""
        if row.is_chunk:
            self.prefill_plans -= 1
            return self.prefill_plans >= 0
        first, self.decode_planned = not self.decode_planned, True
        return first


def prefill_plans_of(stage_count: int) -> int:
    """How many plans of each request's prompt the stages are asked about."""
    return max(1, min(MAX_PREFILL_PLANS, MAX_STAGE_SPANS // stage_count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A moment within a span, in nanoseconds of wall time."""

    name: str
    at_nanoseconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanData:
    """A span and those within it, in nanoseconds of wall time."""

    name: str
    begin_nanoseconds: int
    end_nanoseconds: int
    attributes: dict[str, Attribute] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    children: tuple["SpanData", ...] = ()


def attributes_at_begin(request: AdmittedRequest, model: str) -> dict[str, Attribute]:
    """Attributes known when a request arrives, for samplers too."""
    sampling = request.sampling
    return {
        "gen_ai.operation.name": "chat" if request.is_chat else "text_completion",
        "gen_ai.provider.name": "stageline",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "stageline.request_id": request.request_id,
        "stageline.choice": sampling.choice,
        "stageline.priority": request.priority,
        "stageline.resumed_tokens": len(request.generated_token_ids),
    }


def attributes_at_end(trace: RequestTrace) -> dict[str, Attribute]:
    outcome, times = trace.outcome, trace.times
    assert outcome is not None, "the request has not ended"
    found: dict[str, Attribute] = {
        "gen_ai.usage.output_tokens": times.tokens,
        "stageline.preemptions": max(0, len(trace.places) - 1),
    }
    if outcome.reason is not None:
        found["gen_ai.response.finish_reasons"] = (outcome.reason.value,)
    if outcome.error:
        found["error.type"] = outcome.error
    if trace.places:
        cached = min(trace.places[0].cached_tokens, len(trace.request.prompt_token_ids))
        found["gen_ai.usage.cache_read.input_tokens"] = cached
    if times.tokens:
        found["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrived
    return found


def spans_within(trace: RequestTrace) -> Iterator[SpanData]:
    """The children of a request's span, in time order; phases that it never reached are omitted."""
    anchor, times = trace.anchor, trace.times
    began = trace.request.began_nanoseconds
    submitted, ended = anchor.wall_nanoseconds, anchor.of_performance(trace.ended_nanoseconds)
    if began is not None:
        yield _span(READ_PROMPT, anchor.of_performance(began), submitted)
    if not trace.places:
        yield _span(QUEUE, submitted, ended)
        return
    scheduled = anchor.of_performance(trace.places[0].at_nanoseconds)
    first_token = anchor.of_monotonic(times.first_token) if times.tokens else ended
    yield _span(QUEUE, submitted, scheduled)
    steps = [_stage_span(step, anchor) for step in sorted(trace.steps, key=lambda step: (step.times.seq, step.stage))]
    yield _phase(PREFILL, trace, scheduled, first_token, steps)
    if times.tokens:
        yield _phase(DECODE, trace, first_token, anchor.of_monotonic(times.last_token), steps)


def moments(trace: RequestTrace) -> Iterator[SpanEvent]:
    """The events of a request between its start and its end."""
    if trace.times.tokens:
        yield SpanEvent(name=FIRST_TOKEN, at_nanoseconds=trace.anchor.of_monotonic(trace.times.first_token))
    for place in trace.places[1:]:
        yield SpanEvent(name=SLOT_AGAIN, at_nanoseconds=trace.anchor.of_performance(place.at_nanoseconds))


def _phase(name: str, trace: RequestTrace, begin: int, end: int, steps: list[SpanData]) -> SpanData:
    """Prefill or decode, with the steps of its kind: a decode may run before the token before it is known here."""
    is_decode = name == DECODE
    first = trace.places[0]
    found: dict[str, Attribute] = {"stageline.slot": first.slot, "stageline.cohort": first.cohort}
    if is_decode:
        found["stageline.tokens"] = trace.times.tokens - 1
    return SpanData(
        name=name,
        begin_nanoseconds=begin,
        end_nanoseconds=max(begin, end),
        attributes=found,
        children=tuple(step for step in steps if (step.attributes["stageline.row"] == "decode") == is_decode),
    )


def _stage_span(step: StageStep, anchor: ClockAnchor) -> SpanData:
    times = step.times
    return SpanData(
        name=STAGE_STEP,
        begin_nanoseconds=anchor.of_performance(times.ready - step.offset_nanoseconds),
        end_nanoseconds=anchor.of_performance(times.end - step.offset_nanoseconds),
        attributes={
            "stageline.stage": step.stage,
            "stageline.plan": times.seq,
            "stageline.plan.kind": times.kind,
            "stageline.row": "decode" if step.is_decode else "prefill",
            "stageline.busy_seconds": times.busy / 1e9,
            "stageline.waited_seconds": times.waited / 1e9,
        },
    )


def _span(name: str, begin: int, end: int) -> SpanData:
    return SpanData(name=name, begin_nanoseconds=begin, end_nanoseconds=max(begin, end))
