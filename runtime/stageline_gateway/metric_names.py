"""Names, help texts and bucket families of the gateway's metrics: the one place dashboards and rules take them from.

Request metrics keep vLLM's base names and meaning under the prefix `stageline_`. All durations are read from the
monotonic clock. Counters are named as they are exposed, with `_total`.
"""

from typing import Final, NamedTuple

Buckets = tuple[float, ...]

FIRST_TOKEN_BUCKETS: Final[Buckets] = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600,
)  # fmt: skip
"""Waiting for a first token: from a cached prompt on an idle group to a queue of minutes; finest around 0.5 s."""
TOKEN_GAP_BUCKETS: Final[Buckets] = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 15, 60,
)  # fmt: skip
"""Time between tokens: 1000 tok/s to a stall; finest between 10 and 100 ms, where a reader begins to notice."""
REQUEST_BUCKETS: Final[Buckets] = (
    0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960, 1920, 3600,
)  # fmt: skip
"""Whole answers: one short token to an hour of text; finest between 1 and 60 s."""


class HistogramSpec(NamedTuple):
    """A histogram's name, help and the one bucket family it takes."""

    name: str
    help: str
    buckets: Buckets


class MetricSpec(NamedTuple):
    """A counter's or a gauge's name, help and labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ("model_name",)


TIME_TO_FIRST_TOKEN: Final = HistogramSpec(
    "stageline_time_to_first_token_seconds",
    "From a request's arrival at the gateway to its first generated token there.",
    FIRST_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN: Final = HistogramSpec(
    "stageline_request_time_per_output_token_seconds",
    "Per finished request with two tokens or more: (last token - first token) / (tokens - 1).",
    TOKEN_GAP_BUCKETS,
)
INTER_TOKEN_LATENCY: Final = HistogramSpec(
    "stageline_inter_token_latency_seconds",
    "Time between two messages with new tokens; one sample per message, so several tokens in one count once.",
    TOKEN_GAP_BUCKETS,
)
E2E_REQUEST_LATENCY: Final = HistogramSpec(
    "stageline_e2e_request_latency_seconds",
    "From a request's arrival at the gateway to the end of its answer; only requests that finished.",
    REQUEST_BUCKETS,
)
REQUESTS: Final = MetricSpec(
    "stageline_gateway_requests_total",
    "Requests by the status they were answered with; 499 is a client that left before that. "
    "model_name is empty for a model that isn't served.",
    ("model_name", "code"),
)
IN_FLIGHT: Final = MetricSpec("stageline_gateway_requests_in_flight", "Requests being answered right now.")
PROMPT_TOKENS: Final = MetricSpec("stageline_prompt_tokens_total", "Prompt tokens of admitted requests.")
GENERATION_TOKENS: Final = MetricSpec("stageline_generation_tokens_total", "Generated tokens received from engines.")
ENGINE_LOSSES: Final = MetricSpec(
    "stageline_gateway_engine_losses_total",
    "Requests an engine failed, by how it failed; those that another group took over count too.",
    ("model_name", "kind"),
)
BROKEN_ANSWERS: Final = MetricSpec(
    "stageline_gateway_broken_answers_total",
    "Streams that ended with an error event after their status had been sent.",
)
GROUPS: Final = MetricSpec(
    "stageline_gateway_groups", "Groups in the endpoints file by readiness.", ("model_name", "ready")
)
ENDPOINTS_STALE: Final = MetricSpec(
    "stageline_gateway_endpoints_stale",
    "1 while the endpoints file is missing or malformed and an older version is in force.",
    (),
)
