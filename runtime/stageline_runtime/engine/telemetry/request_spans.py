"""The spans of one ended request as plain data: reading its prompt, wait, prefill, decode, steps on stages. Pure.

Attributes have the names of OpenTelemetry's conventions for generative AI where there is one, else `stageline.*`. They
hold numbers, names and codes, never text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.telemetry.request_trace import ClockAnchor, RequestTrace, StageStep

Attribute = str | bool | int | float | tuple[str, ...]

REQUEST: Final = "engine.request"
READ_PROMPT: Final = "engine.read_prompt"
QUEUE: Final = "engine.queue"
PREFILL: Final = "engine.prefill"
DECODE: Final = "engine.decode"
STAGE_STEP: Final = "stage.step"
FIRST_TOKEN: Final = "first token"
SLOT_AGAIN: Final = "slot again after preemption"


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
    """What is known when a request comes, for samplers too."""
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
    """What came of it."""
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
    """The children of a request's span, in time order; what it never came to is not among them."""
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
    """What happens to a request between its beginning and its end."""
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
