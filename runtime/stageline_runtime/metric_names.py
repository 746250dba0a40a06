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
    "stageline_num_requests_waiting", "Requests admitted to the queue that hold no KV slot yet.", _ENGINE
)
OLDEST_WAITING: Final = MetricSpec(
    "stageline_oldest_waiting_request_seconds",
    "How long the request has waited that waits the longest for its first scheduled row; 0 while none does.",
    _ENGINE,
)
REQUEST_SUCCESS: Final = MetricSpec(
    "stageline_request_success_total",
    "Requests that ended other than by a failure, by why: stop (a stop token or string), length (its token limit), "
    "abort (its sender left, or the gateway moved it to another group).",
    (*_ENGINE, "finished_reason"),
)
REQUEST_FAILURES: Final = MetricSpec(
    "stageline_engine_request_failures_total",
    "Requests that could not be finished, by why: group_lost, guide (the text can't go on as its grammar demands), or "
    "refused (vLLM would not take what the engine had admitted).",
    (*_ENGINE, "reason"),
)
REFUSALS: Final = MetricSpec(
    "stageline_engine_refusals_total",
    "Requests that were not taken, by the error's code: queue_full, draining, not_ready, invalid_value.",
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
    "stageline_preemptions_total", "Times a request lost its KV slot to another, to be computed again.", _ENGINE
)

# -- engine: KV cache -----------------------------------------------------------------------------------------------

KV_CACHE_USAGE: Final = MetricSpec(
    "stageline_kv_cache_usage_ratio", "Share of the KV cache held by running requests, 0 to 1.", _ENGINE
)
KV_BLOCKS: Final = MetricSpec(
    "stageline_kv_blocks",
    "Blocks of the KV cache by state: held by running requests, cached (beginnings of ended ones that may be used "
    "again), free. They sum to the cache's size, which is the same on all stages.",
    (*_ENGINE, "state"),
)
KV_ROOM: Final = MetricSpec(
    "stageline_kv_room_tokens",
    "Tokens of KV cache that a stage's memory has room for beside the weights; stages that share memory share it. The "
    "smallest bounds the cache where not every slot can be full (stageline_stage_kv_capacity_tokens).",
    _STAGE,
)
PREFIX_CACHE_QUERIES: Final = MetricSpec(
    "stageline_prefix_cache_queries_total",
    "Tokens (prompt, and output to continue) that were looked for in the KV cache.",
    _ENGINE,
)
PREFIX_CACHE_HITS: Final = MetricSpec(
    "stageline_prefix_cache_hits_total", "Of these, tokens found there and not computed.", _ENGINE
)

# -- engine: plans and cohorts --------------------------------------------------------------------------------------

PLANS: Final = MetricSpec("stageline_engine_plans_total", "Plans sent to the stages that carry rows.", _ENGINE)
PLANS_IN_FLIGHT: Final = MetricSpec(
    "stageline_plans_in_flight", "Plans sent to the stages whose completion is not known yet.", _ENGINE
)
ITERATION_TOKENS: Final = MetricSpec(
    "stageline_iteration_tokens",
    "Tokens of one plan that carries rows, padding left out.",
    _ENGINE,
    buckets.STEP_TOKENS,
)
COHORT_REQUESTS: Final = MetricSpec(
    "stageline_cohort_requests",
    "Running requests by cohort, now. There are as many cohorts as stages; one plan carries decodes of one.",
    (*_ENGINE, "cohort"),
)
COHORT_ROWS: Final = MetricSpec("stageline_cohort_rows", "Rows (requests) of one plan.", _ENGINE, buckets.COHORT_ROWS)
FEEDBACK_LATENCY: Final = MetricSpec(
    "stageline_feedback_latency_seconds",
    "From the last stage's send of a plan's sampled rows until the first stage, which may be busy with other plans, "
    "has taken them. Sampled about once a second from the newest plans, on clocks compared over the plan bus.",
    _ENGINE,
    buckets.TRANSFER,
)
P2P_LATENCY: Final = MetricSpec(
    "stageline_p2p_latency_seconds",
    "From the start of a hidden tensor's send until the next stage (the label) has it, counted only where that stage "
    "was already waiting, so that it is the link and not the stage. Sampled about once a second from the newest "
    "plans, on clocks compared over the plan bus.",
    _STAGE,
    buckets.TRANSFER,
)
DRAFT_TOKENS: Final = MetricSpec(
    "stageline_engine_draft_tokens_total",
    "Drafts of next tokens that were put to the test by verifying rows of live requests; those of a broken chain never "
    "are. Stays 0 without `spec.engine.speculative`.",
    _ENGINE,
)
ACCEPTED_TOKENS: Final = MetricSpec(
    "stageline_engine_accepted_tokens_total", "Of these drafts, those that became output.", _ENGINE
)
DRAFTED_ROWS: Final = MetricSpec(
    "stageline_engine_drafted_rows_total",
    "Verifying rows of live requests whose drafts were put to the test: a row gives its accepted tokens and one more.",
    _ENGINE,
)
ACCEPTED_AT: Final = MetricSpec(
    "stageline_engine_accepted_tokens_per_position_total",
    "Drafts that became output, by their place in the row: 0 is the first after the newest token.",
    (*_ENGINE, "position"),
)
CANCELLED_PLANS: Final = MetricSpec(
    "stageline_engine_cancelled_plans_total",
    "Plans that guessed what plans before them would sample, and that nobody needs: the guess was wrong, or its "
    "request has ended or lost its slot. Stages were told not to compute them.",
    _ENGINE,
)
ENGINE_BUILD_INFO: Final = MetricSpec(
    "stageline_engine_build_info", "Always 1; the version is a label.", (*_ENGINE, "version")
)

ENGINE_METRICS: Final = (
    NUM_REQUESTS_RUNNING, NUM_REQUESTS_WAITING, OLDEST_WAITING, REQUEST_SUCCESS, REQUEST_FAILURES, REFUSALS,
    REQUEST_QUEUE_TIME, REQUEST_PREFILL_TIME, REQUEST_DECODE_TIME, REQUEST_INFERENCE_TIME, REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS, PROMPT_TOKENS, GENERATION_TOKENS, PREEMPTIONS, KV_CACHE_USAGE, KV_BLOCKS,
    KV_ROOM, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS, PLANS, PLANS_IN_FLIGHT, ITERATION_TOKENS, COHORT_REQUESTS,
    DRAFT_TOKENS, ACCEPTED_TOKENS, DRAFTED_ROWS, ACCEPTED_AT, CANCELLED_PLANS, COHORT_ROWS, FEEDBACK_LATENCY,
    P2P_LATENCY, ENGINE_BUILD_INFO,
)  # fmt: skip
"""What the engine exposes on its HTTP port."""

# -- stage: where its time goes. A stage is in one state at any time: busy + wait + idle = wall ------------------------

STAGE_BUSY: Final = MetricSpec(
    "stageline_stage_busy_seconds_total",
    "Seconds of compute of this stage, by kind of plan; draft is the draft model's, after a plan of any kind; dummy is "
    "compute for nobody and part of the bubble.",
    (*_STAGE, "kind"),
)
STAGE_WAIT: Final = MetricSpec(
    "stageline_stage_wait_seconds_total",
    "Seconds this stage waited while work was outstanding, by what was missing: recv (the hidden tensor), send (room "
    "for its own), feedback (sampled tokens), host (only its own work around compute), starved (a plan).",
    (*_STAGE, "reason"),
)
STAGE_IDLE: Final = MetricSpec(
    "stageline_stage_idle_seconds_total",
    "Seconds in which no request was unfinished; never part of the bubble.",
    _STAGE,
)
STAGE_WALL: Final = MetricSpec(
    "stageline_stage_wall_seconds_total", "Seconds since the stage's clock began; busy + wait + idle.", _STAGE
)
STAGE_BUBBLE: Final = MetricSpec(
    "stageline_stage_bubble_ratio",
    "(wait + dummy) / (busy + wait) of this stage over the last 15 s, or over the plans its timeline holds where "
    "those are fewer; dummy is part of busy, idle time counts as neither. 0 to 1; no sample while nothing was "
    "outstanding.",
    _STAGE,
)
STAGE_STEPS: Final = MetricSpec(
    "stageline_stage_steps_total",
    "Plans run, by kind of compute; of kind draft the steps of the draft model.",
    (*_STAGE, "kind"),
)
STAGE_GRAPH_STEPS: Final = MetricSpec(
    "stageline_stage_graph_steps_total", "Plans run, by how much of them ran captured.", (*_STAGE, "graph")
)
STAGE_TOKENS: Final = MetricSpec(
    "stageline_stage_tokens_total",
    "Tokens run through this stage's layers, padding left out, by kind.",
    (*_STAGE, "kind"),
)
STAGE_STEP: Final = MetricSpec(
    "stageline_stage_step_seconds",
    "Seconds of compute of one plan on this stage (layers; on the last stage also sampling), by kind. Waiting and "
    "transfer are left out: they are the same for all stages, compute is not.",
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
    "What this life of the stage spent in each phase until it was ready: Starting, Connecting, Loading, Rendezvous, "
    "Warming. No sample for phases that it has not left yet.",
    (*_STAGE, "phase"),
)
STAGE_LAYERS: Final = MetricSpec("stageline_stage_layers", "Layers this stage holds.", _STAGE)
STAGE_MEMORY: Final = MetricSpec(
    "stageline_stage_memory_bytes", "Bytes of weights and KV cache this stage holds.", _STAGE
)
STAGE_KV_SLOTS: Final = MetricSpec("stageline_stage_kv_slots", "KV slots of this stage, one request each.", _STAGE)
STAGE_KV_TOKENS: Final = MetricSpec(
    "stageline_stage_kv_tokens",
    "Tokens in this stage's KV slots, an ended request's until its slot is given out again.",
    _STAGE,
)
STAGE_KV_CAPACITY: Final = MetricSpec(
    "stageline_stage_kv_capacity_tokens", "Tokens that this stage's KV slots can hold together.", _STAGE
)
STAGE_INCARNATION: Final = MetricSpec(
    "stageline_stage_incarnation",
    "Which life of its group this stage belongs to: 1 and up, one more each time the group is formed anew.",
    _STAGE,
)
STAGE_PHASE: Final = MetricSpec(
    "stageline_stage_phase", "1 for the phase of its life that this stage is in, 0 for the others.", (*_STAGE, "phase")
)
STAGE_BUILD_INFO: Final = MetricSpec(
    "stageline_stage_build_info", "Always 1; the version is a label.", (*_STAGE, "version")
)

STAGE_METRICS: Final = (
    STAGE_BUSY, STAGE_WAIT, STAGE_IDLE, STAGE_WALL, STAGE_BUBBLE, STAGE_STEPS, STAGE_GRAPH_STEPS, STAGE_TOKENS,
    STAGE_STEP, P2P_BYTES, STAGE_STARTUP, STAGE_LAYERS, STAGE_MEMORY, STAGE_KV_SLOTS, STAGE_KV_TOKENS,
    STAGE_KV_CAPACITY, STAGE_INCARNATION, STAGE_PHASE, STAGE_BUILD_INFO,
)  # fmt: skip
"""What each stage exposes on its health port."""

# -- stage: its ranks, where it has several ----------------------------------------------------------------------------

_RANK: Final = (*_STAGE, "rank")
RANK_BUSY: Final = MetricSpec(
    "stageline_rank_busy_seconds_total",
    "Seconds that this rank of a stage computed, exchanges with its other ranks included.",
    _RANK,
)
RANK_EXCHANGE: Final = MetricSpec(
    "stageline_rank_exchange_seconds_total",
    "Seconds that this rank of a stage spent in exchanges with its other ranks, most of it waiting: the rank that "
    "waits least is the slow one. On devices it is estimated from every seventh exchange.",
    _RANK,
)
RANK_MEMORY: Final = MetricSpec(
    "stageline_rank_memory_bytes", "Bytes of weights and KV cache that this rank of a stage holds.", _RANK
)

RANK_METRICS: Final = (RANK_BUSY, RANK_EXCHANGE, RANK_MEMORY)
"""What a stage of several ranks exposes besides."""
