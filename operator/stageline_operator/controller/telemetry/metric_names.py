"""Names, help texts and labels of the operator's metrics; boards and rules import them from here.

`namespace` and `model` belong to a PipelineModel, not to the operator. Every replica exposes the state of all models,
leader or not, so gauges of models and groups must be aggregated by max. No label contains a pod or a request.
"""

from typing import Final

from stageline_api.telemetry import metric_buckets as buckets
from stageline_api.telemetry.metric_spec import MetricSpec

_MODEL: Final = ("namespace", "model")
_GROUP: Final = (*_MODEL, "group")

RECONCILE_TOTAL: Final = MetricSpec(
    "stageline_operator_reconcile_total",
    "Reconciles of one PipelineModel, by outcome: done, stale (another writer was first), error.",
    ("outcome",),
)
RECONCILE_ERRORS_TOTAL: Final = MetricSpec(
    "stageline_operator_reconcile_errors_total",
    "Failed reconciles, by PipelineModel and kind of error.",
    (*_MODEL, "kind"),
)
RECONCILE_DURATION: Final = MetricSpec(
    "stageline_operator_reconcile_duration_seconds", "Duration of one reconcile.", (), buckets.RECONCILE
)
QUEUE_DEPTH: Final = MetricSpec("stageline_operator_queue_depth", "PipelineModels waiting for a worker.")
WATCH_AGE: Final = MetricSpec(
    "stageline_operator_watch_age_seconds",
    "Time since the last sign of life of a watch or full list of a resource; normally below the relist interval.",
    ("resource",),
)
UNREADABLE: Final = MetricSpec(
    "stageline_operator_unreadable",
    "1 for each resource in each namespace (empty: all) that can't be listed; models that need it are left unchanged.",
    ("namespace", "resource"),
)
RELIST_CORRECTIONS_TOTAL: Final = MetricSpec(
    "stageline_operator_relist_corrections_total",
    "Objects in a full list that the watch had missed.",
    ("resource",),
)
API_REQUESTS_TOTAL: Final = MetricSpec(
    "stageline_operator_api_requests_total",
    "Requests to the API server, of watches those that fail; code 0 means no answer.",
    ("verb", "resource", "code"),
)
LEADER: Final = MetricSpec("stageline_operator_leader", "1 while this replica leads, else 0.")
GATEWAY_EXPECTED: Final = MetricSpec(
    "stageline_operator_gateway_expected",
    "1 for each namespace with a configured gateway (--gateway-url).",
    ("namespace",),
)
MODELS: Final = MetricSpec(
    "stageline_operator_models", "PipelineModels by the status of their Ready condition.", ("ready",)
)
GROUPS: Final = MetricSpec("stageline_operator_groups", "Groups by phase.", (*_MODEL, "phase"))
GROUP_FAILURES_TOTAL: Final = MetricSpec(
    "stageline_operator_group_failures_total",
    "Failures of groups by the class of their cause.",
    (*_MODEL, "failure_class"),
)
GROUP_RESTARTS_TOTAL: Final = MetricSpec(
    "stageline_operator_group_restarts_total",
    "New incarnations of failed groups by the class of the failure.",
    (*_MODEL, "failure_class"),
)
TIME_TO_READY: Final = MetricSpec(
    "stageline_operator_group_time_to_ready_seconds",
    "From the creation of an incarnation's first pod until its group is ready; cold if a pod had to fetch the model.",
    ("cache",),
    buckets.LIFECYCLE,
)
STARTUP_PHASE: Final = MetricSpec(
    "stageline_operator_group_startup_phase_seconds",
    "Start phases, each until the group's last pod has finished it: schedule, pull, prepare, start.",
    ("phase", "cache"),
    buckets.LIFECYCLE,
)
RECOVERY: Final = MetricSpec(
    "stageline_operator_group_recovery_seconds",
    "From a group's failure until its next incarnation is ready, by failure class.",
    ("failure_class",),
    buckets.LIFECYCLE,
)
MODEL_INFO: Final = MetricSpec(
    "stageline_operator_model_info",
    "Always 1 for each PipelineModel; joins its namespace and name with the model_name that clients ask for.",
    (*_MODEL, "model_name"),
)
MODEL_DESIRED_REPLICAS: Final = MetricSpec(
    "stageline_operator_model_desired_replicas", "Groups that the spec wants; 0 while suspended.", _MODEL
)
MODEL_READY_REPLICAS: Final = MetricSpec(
    "stageline_operator_model_ready_replicas", "Groups that answer requests.", _MODEL
)
MODEL_UPDATED_REPLICAS: Final = MetricSpec(
    "stageline_operator_model_updated_replicas",
    "Groups of the current revision.",
    _MODEL,
)
MODEL_GENERATION: Final = MetricSpec(
    "stageline_operator_model_generation", "Generation of the spec (metadata.generation).", _MODEL
)
MODEL_OBSERVED_GENERATION: Final = MetricSpec(
    "stageline_operator_model_observed_generation", "Generation of the spec that the status is about.", _MODEL
)
MODEL_CONDITION: Final = MetricSpec(
    "stageline_operator_model_condition",
    "1 for each condition (Available, Progressing, Degraded, Ready, Stalled) with its status and reason.",
    (*_MODEL, "type", "status", "reason"),
)
GROUP_PHASE: Final = MetricSpec(
    "stageline_operator_group_phase",
    "1 for the current phase of a group.",
    (*_GROUP, "phase"),
)
GROUP_INCARNATION: Final = MetricSpec(
    "stageline_operator_group_incarnation",
    "Number of times the group's pods have been created.",
    _GROUP,
)
GROUP_RESTARTS_LEFT: Final = MetricSpec(
    "stageline_operator_group_restarts_left",
    "Restarts that a group has left in its window (spec.restart).",
    _GROUP,
)
GROUP_RECENT_RESTARTS: Final = MetricSpec(
    "stageline_operator_group_recent_restarts",
    "Restarts that a group has used within its window (spec.restart).",
    _GROUP,
)
GROUP_LAST_FAILURE: Final = MetricSpec(
    "stageline_operator_group_last_failure_timestamp_seconds",
    "Unix time of a group's latest failure, with the stage that failed first and the class.",
    (*_GROUP, "stage", "failure_class"),
)
STAGE_NOT_READY: Final = MetricSpec(
    "stageline_operator_stage_not_ready",
    "1 for each stage of a group that is not ready, with the reason: Starting, Unschedulable, ImagePull, "
    "NotStarted, QuotaExceeded, PodRefused, NodeUnreachable, NodeLost, Ending, NoPod.",
    (*_GROUP, "stage", "reason"),
)
LONGEST_PASS: Final = MetricSpec(
    "stageline_operator_longest_pass_seconds",
    "Duration of the longest running reconcile; 0 if none.",
)
BUILD_INFO: Final = MetricSpec("stageline_operator_build_info", "Always 1; the version is a label.", ("version",))

ALL_METRICS: Final = (
    RECONCILE_TOTAL, RECONCILE_ERRORS_TOTAL, RECONCILE_DURATION, QUEUE_DEPTH, WATCH_AGE, UNREADABLE,
    RELIST_CORRECTIONS_TOTAL, API_REQUESTS_TOTAL, LEADER, GATEWAY_EXPECTED, MODELS, GROUPS, GROUP_FAILURES_TOTAL,
    GROUP_RESTARTS_TOTAL, TIME_TO_READY, STARTUP_PHASE, RECOVERY, MODEL_INFO, MODEL_DESIRED_REPLICAS,
    MODEL_READY_REPLICAS, MODEL_UPDATED_REPLICAS, MODEL_GENERATION, MODEL_OBSERVED_GENERATION, MODEL_CONDITION,
    GROUP_PHASE, GROUP_INCARNATION, GROUP_RECENT_RESTARTS, GROUP_RESTARTS_LEFT, GROUP_LAST_FAILURE, STAGE_NOT_READY,
    LONGEST_PASS, BUILD_INFO,
)  # fmt: skip
