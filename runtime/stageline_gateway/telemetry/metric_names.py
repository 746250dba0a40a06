"""Names, help texts and labels of the gateway's metrics: the one place boards and rules take them from.

Request metrics keep vLLM's base names and meaning under the prefix `stageline_`. All durations are read from the
monotonic clock. Only names of models that are served become values of `model_name`; `namespace` is that of their
PipelineModels, and empty on one machine, where the scrape says it.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from stageline_api.telemetry import metric_buckets as buckets
from stageline_api.telemetry.metric_spec import MetricSpec

NAMESPACE: Final = "namespace"
_MODEL: Final = (NAMESPACE, "model_name")

TIME_TO_FIRST_TOKEN: Final = MetricSpec(
    "stageline_time_to_first_token_seconds",
    "From a request's arrival at the gateway to its first generated token there.",
    _MODEL,
    buckets.FIRST_TOKEN,
)
TIME_PER_OUTPUT_TOKEN: Final = MetricSpec(
    "stageline_request_time_per_output_token_seconds",
    "Per finished request with two tokens or more: (last token - first token) / (tokens - 1).",
    _MODEL,
    buckets.TOKEN_GAP,
)
INTER_TOKEN_LATENCY: Final = MetricSpec(
    "stageline_inter_token_latency_seconds",
    "Time between two messages with new tokens; one sample per message, so several tokens in one count once.",
    _MODEL,
    buckets.TOKEN_GAP,
)
QUEUE_TIME: Final = MetricSpec(
    "stageline_gateway_queue_time_seconds",
    "From a request's arrival at the gateway to its being taken by an engine: reading and checking it, waiting for a "
    "ready group, other engines tried. The engine's own queue comes after it (stageline_request_queue_time_seconds).",
    _MODEL,
    buckets.QUEUE,
)
E2E_REQUEST_LATENCY: Final = MetricSpec(
    "stageline_e2e_request_latency_seconds",
    "From a request's arrival at the gateway to the end of its answer; only requests that finished.",
    _MODEL,
    buckets.REQUEST,
)
REQUESTS: Final = MetricSpec(
    "stageline_gateway_requests_total",
    "Requests by the status they were answered with; 499 is a client that left before that. model_name is empty for "
    "a model that isn't served.",
    (*_MODEL, "code"),
)
ABANDONED_AFTER: Final = MetricSpec(
    "stageline_gateway_abandoned_after_seconds",
    "From a request's arrival to its client's leaving, of requests whose client left before any token came. Where the "
    "status had been sent by then, the request counts as 200, else as 499.",
    _MODEL,
    buckets.FIRST_TOKEN,
)
IN_FLIGHT: Final = MetricSpec("stageline_gateway_requests_in_flight", "Requests being answered right now.", _MODEL)
QUEUED: Final = MetricSpec(
    "stageline_gateway_requests_queued", "Choices of requests that wait for their first token.", _MODEL
)
PROMPT_TOKENS: Final = MetricSpec("stageline_prompt_tokens_total", "Prompt tokens of admitted requests.", _MODEL)
GENERATION_TOKENS: Final = MetricSpec(
    "stageline_generation_tokens_total", "Generated tokens received from engines.", _MODEL
)
ENGINE_LOSSES: Final = MetricSpec(
    "stageline_gateway_engine_losses_total",
    "Requests an engine failed, by how it failed; those that another group took over count too. Of kind left are those "
    "that changed groups because theirs drains: no failure.",
    (*_MODEL, "kind"),
)
BROKEN_ANSWERS: Final = MetricSpec(
    "stageline_gateway_broken_answers_total",
    "Streams that ended with an error event after their status had been sent, unless what was asked was the reason.",
    _MODEL,
)
RESUMES: Final = MetricSpec(
    "stageline_gateway_resumes_total",
    "Requests that another run took over, by outcome: resumed (mid-answer), moved (before its first token); and "
    "those that none could: expired (not within the resume window), refused (by the next engine), exhausted (too "
    "many engines lost).",
    (*_MODEL, "outcome"),
)
CIRCUITS_OPEN: Final = MetricSpec(
    "stageline_gateway_circuits_open",
    "Groups that rest because requests to them failed, or that are on trial.",
    _MODEL,
)
BODY_BYTES: Final = MetricSpec(
    "stageline_gateway_body_bytes", "Bytes of the bodies of requests that are being read or answered."
)
REFUSALS: Final = MetricSpec(
    "stageline_gateway_refusals_total",
    "Requests kept out by a limit, by the key's name (empty without keys) and the error's code.",
    ("key_name", "reason"),
)
KEY_TOKENS: Final = MetricSpec(
    "stageline_gateway_key_tokens_total", "Tokens of prompts and answers by the key's name.", ("key_name",)
)
SLOW_READERS: Final = MetricSpec(
    "stageline_gateway_slow_readers_total", "Answers ended because their client stopped reading.", _MODEL
)
KEYS_STALE: Final = MetricSpec(
    "stageline_gateway_keys_stale", "1 while the API keys can't be read again and older ones are in force, else 0."
)
TLS_STALE: Final = MetricSpec(
    "stageline_gateway_tls_stale",
    "1 while the certificate and key can't be read again and older ones are in force, else 0.",
)
TLS_EXPIRY: Final = MetricSpec(
    "stageline_gateway_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate in force expires; no sample where no TLS is served.",
)
GROUPS: Final = MetricSpec(
    "stageline_gateway_groups",
    "Groups by readiness: as discovery, probes and circuits see it.",
    (*_MODEL, "ready"),
)
ENDPOINTS_STALE: Final = MetricSpec(
    "stageline_gateway_endpoints_stale",
    "1 while what discovery reads (endpoints file, Kubernetes API) is unavailable and an older version is in "
    "force, else 0.",
    (NAMESPACE,),
)
DISCOVERY_AGE: Final = MetricSpec(
    "stageline_gateway_discovery_age_seconds",
    "Time since what discovery reads was last seen to be as it is: the endpoints file looked at, or in a cluster the "
    "older of the last lists or events of pods and of PipelineModels. In a cluster it stays below the relist "
    "interval.",
    (NAMESPACE,),
)
WORKERS_LOST: Final = MetricSpec(
    "stageline_gateway_workers_lost_total",
    "Workers of a gateway of several (--workers) that ended unasked, whose places were given to new ones.",
)
BUILD_INFO: Final = MetricSpec("stageline_gateway_build_info", "Always 1; the version is a label.", ("version",))

ALL_METRICS: Final = (
    TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, INTER_TOKEN_LATENCY, QUEUE_TIME, E2E_REQUEST_LATENCY, REQUESTS,
    ABANDONED_AFTER, IN_FLIGHT, QUEUED, BODY_BYTES, PROMPT_TOKENS, GENERATION_TOKENS, ENGINE_LOSSES, BROKEN_ANSWERS,
    RESUMES, CIRCUITS_OPEN, REFUSALS, KEY_TOKENS, SLOW_READERS, KEYS_STALE, TLS_STALE, TLS_EXPIRY, GROUPS,
    ENDPOINTS_STALE, DISCOVERY_AGE, WORKERS_LOST, BUILD_INFO,
)  # fmt: skip


class OfWorkers(Enum):
    """What of the values that a gauge has in several workers stands for the gateway."""

    SUM = "sum"
    HIGHEST = "highest"
    LOWEST = "lowest"


GAUGES_OF_WORKERS: Final[Mapping[str, OfWorkers]] = {
    IN_FLIGHT.name: OfWorkers.SUM,
    QUEUED.name: OfWorkers.SUM,
    BODY_BYTES.name: OfWorkers.SUM,
    # Each sees the same groups by itself: a group rests for the gateway if it does for one.
    CIRCUITS_OPEN.name: OfWorkers.HIGHEST,
    KEYS_STALE.name: OfWorkers.HIGHEST,
    TLS_STALE.name: OfWorkers.HIGHEST,
    TLS_EXPIRY.name: OfWorkers.LOWEST,
    ENDPOINTS_STALE.name: OfWorkers.HIGHEST,
    DISCOVERY_AGE.name: OfWorkers.HIGHEST,
    BUILD_INFO.name: OfWorkers.HIGHEST,
}
"""All but `GROUPS`, of which it depends on the label."""
