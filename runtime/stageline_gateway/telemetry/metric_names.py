"""Names, help texts and labels of the gateway's metrics: the one place boards and rules take them from.

Request metrics keep vLLM's base names and meaning under the prefix `stageline_`. All durations are read from the
monotonic clock. Only names of models that are served become values of `model_name`; `namespace` is that of their
PipelineModels, and empty on one machine, where the scrape says it.
"""

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
    "Time between two messages with new tokens; several tokens in one message count once.",
    _MODEL,
    buckets.TOKEN_GAP,
)
QUEUE_TIME: Final = MetricSpec(
    "stageline_gateway_queue_time_seconds",
    "From a request's arrival at the gateway until an engine accepts it, waits for a ready group included.",
    _MODEL,
    buckets.QUEUE,
)
E2E_REQUEST_LATENCY: Final = MetricSpec(
    "stageline_e2e_request_latency_seconds",
    "From a request's arrival at the gateway to the end of its answer; finished requests only.",
    _MODEL,
    buckets.REQUEST,
)
REQUESTS: Final = MetricSpec(
    "stageline_gateway_requests_total",
    "Requests by status code; 499: the client left before. model_name is empty for an unknown model.",
    (*_MODEL, "code"),
)
ABANDONED_AFTER: Final = MetricSpec(
    "stageline_gateway_abandoned_after_seconds",
    "From arrival until the client left, for requests without a first token.",
    _MODEL,
    buckets.FIRST_TOKEN,
)
IN_FLIGHT: Final = MetricSpec("stageline_gateway_requests_in_flight", "Requests being answered.", _MODEL)
QUEUED: Final = MetricSpec(
    "stageline_gateway_requests_queued", "Choices of requests that wait for their first token.", _MODEL
)
PROMPT_TOKENS: Final = MetricSpec("stageline_prompt_tokens_total", "Prompt tokens of admitted requests.", _MODEL)
GENERATION_TOKENS: Final = MetricSpec(
    "stageline_generation_tokens_total", "Generated tokens received from engines.", _MODEL
)
ENGINE_LOSSES: Final = MetricSpec(
    "stageline_gateway_engine_losses_total",
    "Requests that an engine failed, by kind, including those that another group resumed. Kind left: moved off a "
    "draining group, no failure.",
    (*_MODEL, "kind"),
)
BROKEN_ANSWERS: Final = MetricSpec(
    "stageline_gateway_broken_answers_total",
    "Streams that ended with an error event after their status was sent, unless the request itself was the cause.",
    _MODEL,
)
RESUMES: Final = MetricSpec(
    "stageline_gateway_resumes_total",
    "Requests that moved to another group, by outcome: resumed (mid-answer), moved (before the first token); and "
    "failures to do so: expired, refused, exhausted.",
    (*_MODEL, "outcome"),
)
CIRCUITS_OPEN: Final = MetricSpec(
    "stageline_gateway_circuits_open",
    "Groups with an open or half-open circuit breaker.",
    _MODEL,
)
BODY_BYTES: Final = MetricSpec(
    "stageline_gateway_body_bytes", "Bytes of the bodies of requests that are being read or answered."
)
REFUSALS: Final = MetricSpec(
    "stageline_gateway_refusals_total",
    "Requests refused by a limit, by key name (empty without keys) and error code.",
    ("key_name", "reason"),
)
KEY_TOKENS: Final = MetricSpec(
    "stageline_gateway_key_tokens_total", "Tokens of prompts and answers by the key's name.", ("key_name",)
)
SLOW_READERS: Final = MetricSpec(
    "stageline_gateway_slow_readers_total", "Answers ended because the client stopped reading.", _MODEL
)
KEYS_STALE: Final = MetricSpec(
    "stageline_gateway_keys_stale", "1 while the API keys can't be reloaded and older ones are in force, else 0."
)
TLS_STALE: Final = MetricSpec(
    "stageline_gateway_tls_stale",
    "1 while certificate and key can't be reloaded and older ones are in force, else 0.",
)
TLS_EXPIRY: Final = MetricSpec(
    "stageline_gateway_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate in force expires; no sample where no TLS is served.",
)
GROUPS: Final = MetricSpec(
    "stageline_gateway_groups",
    "Groups by readiness, by discovery, probes and circuit breakers.",
    (*_MODEL, "ready"),
)
ENDPOINTS_STALE: Final = MetricSpec(
    "stageline_gateway_endpoints_stale",
    "1 while discovery (endpoints file or Kubernetes API) is unavailable and an older state is in force, else 0.",
    (NAMESPACE,),
)
DISCOVERY_AGE: Final = MetricSpec(
    "stageline_gateway_discovery_age_seconds",
    "Time since discovery was last current; in a cluster the older of the last lists or signs of life of a watch of "
    "pods and of PipelineModels, below two minutes.",
    (NAMESPACE,),
)
BUILD_INFO: Final = MetricSpec("stageline_gateway_build_info", "Always 1; the version is a label.", ("version",))

ALL_METRICS: Final = (
    TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, INTER_TOKEN_LATENCY, QUEUE_TIME, E2E_REQUEST_LATENCY, REQUESTS,
    ABANDONED_AFTER, IN_FLIGHT, QUEUED, BODY_BYTES, PROMPT_TOKENS, GENERATION_TOKENS, ENGINE_LOSSES, BROKEN_ANSWERS,
    RESUMES, CIRCUITS_OPEN, REFUSALS, KEY_TOKENS, SLOW_READERS, KEYS_STALE, TLS_STALE, TLS_EXPIRY, GROUPS,
    ENDPOINTS_STALE, DISCOVERY_AGE, BUILD_INFO,
)  # fmt: skip
