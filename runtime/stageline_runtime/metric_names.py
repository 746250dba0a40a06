"""Names, help texts and labels of the engine's and the stages' metrics: the one place boards and rules take them from.

Request metrics keep vLLM's base names and meaning under the prefix `stageline_`; what vLLM calls
`iteration_tokens_total` ends without `_total` here, since it is a histogram. All durations are read from monotonic
clocks. `model_name` is the name clients ask for; no request appears in a label. Nothing of torch is imported here.
"""

from typing import Final

from stageline_api.telemetry import metric_buckets as buckets
from stageline_api.telemetry.metric_spec import MetricSpec

_ENGINE: Final = ("model_name",)
_STAGE: Final = ("model_name", "stage")

# -- engine: requests -----------------------------------------------------------------------------------------------

NUM_REQUESTS_RUNNING: Final = MetricSpec("stageline_num_requests_running", "Requests that hold a KV slot.", _ENGINE)
NUM_REQUESTS_WAITING: Final = MetricSpec(
    "stageline_num_requests_waiting", "Requests in the queue without a KV slot.", _ENGINE
)
OLDEST_WAITING: Final = MetricSpec(
    "stageline_oldest_waiting_request_seconds",
    "Longest current wait for a first scheduled row; 0 if none waits.",
    _ENGINE,
)
REQUEST_SUCCESS: Final = MetricSpec(
    "stageline_request_success_total",
    "Requests that ended without a failure, by reason: stop, length, abort (the client left, or the gateway moved "
    "the request).",
    (*_ENGINE, "finished_reason"),
)
REQUEST_FAILURES: Final = MetricSpec(
    "stageline_engine_request_failures_total",
    "Requests that could not be finished, by reason: group_lost, guide (its grammar allows no further token), "
    "refused (vLLM refused an admitted request).",
    (*_ENGINE, "reason"),
)
REFUSALS: Final = MetricSpec(
    "stageline_engine_refusals_total",
    "Requests refused, by error code: queue_full, draining, not_ready, invalid_value.",
    (*_ENGINE, "reason"),
)
REQUEST_QUEUE_TIME: Final = MetricSpec(
    "stageline_request_queue_time_seconds",
    "From a request's arrival at the engine to its first scheduled row.",
    _ENGINE,
    buckets.QUEUE,
)
REQUEST_PREFILL_TIME: Final = MetricSpec(
    "stageline_request_prefill_time_seconds",
    "From a request's first scheduled row to its first token at the engine.",
    _ENGINE,
    buckets.REQUEST,
)
REQUEST_DECODE_TIME: Final = MetricSpec(
    "stageline_request_decode_time_seconds",
    "From a request's first token at the engine to its last; requests that ended by stop or length.",
    _ENGINE,
    buckets.REQUEST,
)
REQUEST_INFERENCE_TIME: Final = MetricSpec(
    "stageline_request_inference_time_seconds",
    "From a request's first scheduled row to its last token at the engine; requests that ended by stop or length.",
    _ENGINE,
    buckets.REQUEST,
)
REQUEST_PROMPT_TOKENS: Final = MetricSpec(
    "stageline_request_prompt_tokens",
    "Prompt tokens of a request, observed when its first row is scheduled.",
    _ENGINE,
    buckets.REQUEST_TOKENS,
)
REQUEST_GENERATION_TOKENS: Final = MetricSpec(
    "stageline_request_generation_tokens",
    "Tokens that this engine sampled for a request; requests that ended by stop or length.",
    _ENGINE,
    buckets.REQUEST_TOKENS,
)
PROMPT_TOKENS: Final = MetricSpec(
    "stageline_engine_prompt_tokens_total", "Prompt tokens of requests given a KV slot.", _ENGINE
)
GENERATION_TOKENS: Final = MetricSpec(
    "stageline_engine_generation_tokens_total", "Tokens sampled for live requests.", _ENGINE
)
PREEMPTIONS: Final = MetricSpec(
    "stageline_preemptions_total", "Times a request lost its KV slot to another, to be recomputed.", _ENGINE
)

# -- engine: KV cache -----------------------------------------------------------------------------------------------

KV_CACHE_USAGE: Final = MetricSpec(
    "stageline_kv_cache_usage_ratio", "Share of the KV cache held by running requests, 0 to 1.", _ENGINE
)
KV_BLOCKS: Final = MetricSpec(
    "stageline_kv_blocks",
    "KV cache blocks by state: running requests, cached prefixes, free. Their sum is the cache's size.",
    (*_ENGINE, "state"),
)
KV_ROOM: Final = MetricSpec(
    "stageline_kv_room_tokens",
    "Tokens of KV cache for which a stage's memory has capacity beside the weights. The smallest one bounds the cache.",
    _STAGE,
)
PREFIX_CACHE_QUERIES: Final = MetricSpec(
    "stageline_prefix_cache_queries_total",
    "Tokens looked up in the prefix cache.",
    _ENGINE,
)
PREFIX_CACHE_HITS: Final = MetricSpec(
    "stageline_prefix_cache_hits_total", "Tokens found there and not computed.", _ENGINE
)

# -- engine: plans and cohorts --------------------------------------------------------------------------------------

PLANS: Final = MetricSpec("stageline_engine_plans_total", "Plans sent to the stages that carry rows.", _ENGINE)
PLANS_IN_FLIGHT: Final = MetricSpec(
    "stageline_plans_in_flight", "Plans sent to the stages and not yet completed.", _ENGINE
)
ITERATION_TOKENS: Final = MetricSpec(
    "stageline_iteration_tokens",
    "Tokens of one plan with rows, without padding.",
    _ENGINE,
    buckets.STEP_TOKENS,
)
COHORT_REQUESTS: Final = MetricSpec(
    "stageline_cohort_requests",
    "Running requests by microbatch (cohort). There is one for each stage; a plan carries decodes of one.",
    (*_ENGINE, "cohort"),
)
COHORT_ROWS: Final = MetricSpec("stageline_cohort_rows", "Rows (requests) of one plan.", _ENGINE, buckets.COHORT_ROWS)
FEEDBACK_LATENCY: Final = MetricSpec(
    "stageline_feedback_latency_seconds",
    "From the last stage's send of sampled rows until the first stage has them. Sampled about once a second.",
    _ENGINE,
    buckets.TRANSFER,
)
P2P_LATENCY: Final = MetricSpec(
    "stageline_p2p_latency_seconds",
    "From the start of a hidden tensor's send until the next stage (the label) has it, only if that stage was "
    "already waiting. Sampled about once a second.",
    _STAGE,
    buckets.TRANSFER,
)
DRAFT_TOKENS: Final = MetricSpec(
    "stageline_engine_draft_tokens_total",
    "Drafted tokens that were verified; 0 without `spec.engine.speculative`.",
    _ENGINE,
)
ACCEPTED_TOKENS: Final = MetricSpec(
    "stageline_engine_accepted_tokens_total", "Drafted tokens that became output.", _ENGINE
)
DRAFTED_ROWS: Final = MetricSpec(
    "stageline_engine_drafted_rows_total",
    "Rows with verified drafts; each yields its accepted tokens and one more.",
    _ENGINE,
)
ACCEPTED_AT: Final = MetricSpec(
    "stageline_engine_accepted_tokens_per_position_total",
    "Accepted drafts by position in the row, from 0.",
    (*_ENGINE, "position"),
)
ENGINE_BUILD_INFO: Final = MetricSpec(
    "stageline_engine_build_info", "Always 1; the version is a label.", (*_ENGINE, "version")
)

ENGINE_METRICS: Final = (
    NUM_REQUESTS_RUNNING, NUM_REQUESTS_WAITING, OLDEST_WAITING, REQUEST_SUCCESS, REQUEST_FAILURES, REFUSALS,
    REQUEST_QUEUE_TIME, REQUEST_PREFILL_TIME, REQUEST_DECODE_TIME, REQUEST_INFERENCE_TIME, REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS, PROMPT_TOKENS, GENERATION_TOKENS, PREEMPTIONS, KV_CACHE_USAGE, KV_BLOCKS,
    KV_ROOM, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS, PLANS, PLANS_IN_FLIGHT, ITERATION_TOKENS, COHORT_REQUESTS,
    DRAFT_TOKENS, ACCEPTED_TOKENS, DRAFTED_ROWS, ACCEPTED_AT, COHORT_ROWS, FEEDBACK_LATENCY,
    P2P_LATENCY, ENGINE_BUILD_INFO,
)  # fmt: skip
"""What the engine exposes on its HTTP port."""

# -- stage: where its time goes. A stage is in one state at any time: busy + wait + idle = wall ------------------------

STAGE_BUSY: Final = MetricSpec(
    "stageline_stage_busy_seconds_total",
    "Compute seconds of this stage, by kind of plan. Kind draft: the draft model. Kind dummy: padding only, part of "
    "the bubble.",
    (*_STAGE, "kind"),
)
STAGE_WAIT: Final = MetricSpec(
    "stageline_stage_wait_seconds_total",
    "Seconds this stage waited while requests were outstanding, by reason: recv (hidden tensor), send (buffer for "
    "its own), feedback (sampled tokens), host (its own CPU work), starved (no plan).",
    (*_STAGE, "reason"),
)
STAGE_IDLE: Final = MetricSpec(
    "stageline_stage_idle_seconds_total",
    "Seconds without an unfinished request; never part of the bubble.",
    _STAGE,
)
STAGE_WALL: Final = MetricSpec(
    "stageline_stage_wall_seconds_total", "Seconds since the stage's clock began; busy + wait + idle.", _STAGE
)
STAGE_BUBBLE: Final = MetricSpec(
    "stageline_stage_bubble_ratio",
    "(wait + dummy) / (busy + wait) of this stage over the last 15 s, 0 to 1; no sample while nothing was outstanding.",
    _STAGE,
)
STAGE_STEPS: Final = MetricSpec(
    "stageline_stage_steps_total",
    "Plans run, by kind; kind draft counts steps of the draft model.",
    (*_STAGE, "kind"),
)
STAGE_GRAPH_STEPS: Final = MetricSpec(
    "stageline_stage_graph_steps_total", "Plans run, by CUDA graph mode.", (*_STAGE, "graph")
)
STAGE_TOKENS: Final = MetricSpec(
    "stageline_stage_tokens_total",
    "Tokens run through this stage's layers, without padding, by kind.",
    (*_STAGE, "kind"),
)
STAGE_STEP: Final = MetricSpec(
    "stageline_stage_step_seconds",
    "Compute seconds of one plan on this stage, by kind; sampling included on the last stage, waiting and transfer "
    "excluded.",
    (*_STAGE, "kind"),
    buckets.STEP,
)
P2P_BYTES: Final = MetricSpec(
    "stageline_p2p_bytes_total",
    "Bytes sent to another stage: hidden tensors to the next, padding included; feedback to the first.",
    (*_STAGE, "tensor"),
)

# -- stage: what it holds -------------------------------------------------------------------------------------------

STAGE_STARTUP: Final = MetricSpec(
    "stageline_stage_startup_seconds",
    "Seconds that this incarnation of the stage spent in each start phase: Starting, Connecting, Loading, "
    "Rendezvous, Warming.",
    (*_STAGE, "phase"),
)
STAGE_LAYERS: Final = MetricSpec("stageline_stage_layers", "Layers this stage holds.", _STAGE)
STAGE_MEMORY: Final = MetricSpec(
    "stageline_stage_memory_bytes", "Bytes of weights and KV cache this stage holds.", _STAGE
)
STAGE_KV_SLOTS: Final = MetricSpec("stageline_stage_kv_slots", "KV slots of this stage, one request each.", _STAGE)
STAGE_KV_TOKENS: Final = MetricSpec(
    "stageline_stage_kv_tokens",
    "Positions of the KV cache blocks that this stage's slots use; a block that several share counts once.",
    _STAGE,
)
STAGE_KV_CAPACITY: Final = MetricSpec(
    "stageline_stage_kv_capacity_tokens", "Maximum tokens of this stage's KV slots.", _STAGE
)
STAGE_INCARNATION: Final = MetricSpec(
    "stageline_stage_incarnation",
    "Incarnation of the stage's group, from 1.",
    _STAGE,
)
STAGE_PHASE: Final = MetricSpec(
    "stageline_stage_phase", "1 for the current phase of this stage, 0 for the others.", (*_STAGE, "phase")
)
STAGE_LACKS_KERNELS: Final = MetricSpec(
    "stageline_stage_lacks_native_kernels",
    "1 if torch's operators replace native CPU kernels (no C compiler and no prebuilt kernels): slower, and rounded "
    "differently from other stages. Otherwise 0.",
    _STAGE,
)
STAGE_BUILD_INFO: Final = MetricSpec(
    "stageline_stage_build_info", "Always 1; the version is a label.", (*_STAGE, "version")
)

STAGE_METRICS: Final = (
    STAGE_BUSY, STAGE_WAIT, STAGE_IDLE, STAGE_WALL, STAGE_BUBBLE, STAGE_STEPS, STAGE_GRAPH_STEPS, STAGE_TOKENS,
    STAGE_STEP, P2P_BYTES, STAGE_STARTUP, STAGE_LAYERS, STAGE_MEMORY, STAGE_KV_SLOTS, STAGE_KV_TOKENS,
    STAGE_KV_CAPACITY, STAGE_INCARNATION, STAGE_PHASE, STAGE_LACKS_KERNELS,
    STAGE_BUILD_INFO,
)  # fmt: skip
"""What each stage exposes on its health port."""

# -- stage: its ranks, where it has several ----------------------------------------------------------------------------

_RANK: Final = (*_STAGE, "rank")
RANK_BUSY: Final = MetricSpec(
    "stageline_rank_busy_seconds_total",
    "Compute seconds of this rank, exchanges with other ranks included.",
    _RANK,
)
RANK_EXCHANGE: Final = MetricSpec(
    "stageline_rank_exchange_seconds_total",
    "Seconds of this rank in exchanges with other ranks, mostly waiting: the rank that waits least is the slow one. "
    "On devices estimated from every seventh exchange.",
    _RANK,
)
RANK_MEMORY: Final = MetricSpec(
    "stageline_rank_memory_bytes", "Bytes of weights and KV cache that this rank of a stage holds.", _RANK
)

RANK_METRICS: Final = (RANK_BUSY, RANK_EXCHANGE, RANK_MEMORY)
"""What a stage of several ranks exposes besides."""
