"""The interface of the engine's core for its HTTP edge: submit, abort, inspect, drain.

The edge handles text, the core token ids: the core stops a request at a stop token or at its token limit, the edge
stops it at a stop string by `abort`. A submitted request's sink gets exactly one `EndEvent` or `FailEvent`, as its
last event.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stageline_api.engine_http import FinishReason, HeldPrefixes, ModelInfo, ThoughtStart, ToolCallFormat
from stageline_api.health import EngineStatus
from stageline_runtime.engine.errors import EngineRefusal as EngineRefusal
from stageline_runtime.plan_bus.messages import PromptReport, RequestSampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A checked request: every id is within the vocabulary and prompt plus `max_new_tokens` fit the context."""

    request_id: str
    """Unique among live requests."""
    prompt_token_ids: tuple[int, ...]
    sampling: RequestSampling
    max_new_tokens: int
    """At least 1."""
    stop_token_ids: frozenset[int]
    """Ids that end the output; end-of-sequence ids are among them unless `ignore_eos`."""
    stop: tuple[str, ...] = ()
    """Strings that end the output: checked by the edge, since the core handles no text."""
    tool_call_format: ToolCallFormat | None = None
    """How the answer writes tool calls, for readers of its text."""
    thoughts: ThoughtStart | None = None
    """How the answer may begin with reasoning."""
    ignored: tuple[str, ...] = ()
    """Fields of the prompt that have no effect with this model."""
    prompt_told: int | None = None
    """How many prompt tokens the client already has; the rest are sent to it. None: none are sent."""
    is_prompt_only: bool = False
    """No token of its output is wanted, of the one that is computed."""
    lists_stop_token: bool = False
    """Log probabilities are reported of a stop token too."""
    generated_token_ids: tuple[int, ...] = ()
    """Output generated before, which this request continues; fewer than `max_new_tokens`, none of them a stop token,
    where it is handed to a core."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str | None = None
    """Only requests with the same one share what the cache holds of prompts."""
    prefixes: tuple[tuple[str, int], ...] = ()
    """Names of the prompt's beginnings, and how many tokens each has."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers; None: the model itself."""
    is_chat: bool = False
    traceparent: str | None = None
    """W3C trace context of the client."""
    tracestate: str | None = None
    began_nanoseconds: int | None = None
    """When rendering and tokenizing its prompt began, by `time.perf_counter_ns`; None if not recorded."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Newly sampled tokens, in order. A stop token is part of them, and then the last of the request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, or none at all when the request didn't ask."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that were found in the cache; the same for all tokens of a request."""


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log probabilities of the next prompt tokens, if requested: each token except the first appears once, in order,
    and before any `TokenEvent`."""

    report: PromptReport


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The request ended as it should: STOP after a stop token, LENGTH at its limit, ABORT after `abort`."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FailEvent:
    """The request can't be finished; `message` is a sentence for its sender."""

    message: str
    is_final: bool = False
    """Whether the request itself is the cause, so that no other engine would finish it either."""
    is_suspect: bool = False
    """Whether the group hung while it computed this."""
    was_waiting: bool = False
    """Whether the group ended while this waited for its turn."""


CoreEvent = PromptEvent | TokenEvent | EndEvent | FailEvent
AnswerSink = Callable[[CoreEvent], None]
"""Takes a request's events, in the core's own turn of the event loop: it must be quick, never raise, and may abort."""


class EngineCoreApi(Protocol):
    """The core as the edge sees it. Called from the event loop's thread only."""

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        """Accept the request; its events go to `sink`, none of them before this returns.

        A caller that wants no more events calls `abort`.

        Raises:
            EngineRefusal: at once, when not ready, draining, or the queue is full.
        """
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now, for `reason`: STOP at a stop string. Does nothing when it is unknown or has ended."""
        ...

    def steps_while_queued(self, request_id: str) -> int | None:
        """How many steps the group has begun so far, while a request has no slot; None once it has, or isn't known."""
        ...

    def status(self) -> EngineStatus:
        """The engine's account of the group."""
        ...

    def held_prefixes(self) -> HeldPrefixes:
        """Which of the beginnings that requests named are in the prefix cache."""
        ...

    def info(self) -> ModelInfo:
        """What is served."""
        ...

    def start_drain(self) -> None:
        """Refuse new requests from now on and let running ones finish. Idempotent."""
        ...

    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        """Metrics in the format that the header `accept` requests, and their content type."""
        ...
