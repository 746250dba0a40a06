"""Condition types and reasons of a PipelineModel, in metav1 form."""

from enum import StrEnum


class ConditionType(StrEnum):
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    READY = "Ready"


class Reason(StrEnum):
    ALL_GROUPS_READY = "AllGroupsReady"
    GROUPS_NOT_READY = "GroupsNotReady"
    GROUPS_STARTING = "GroupsStarting"
    GROUP_FAILED = "GroupFailed"
    BACKING_OFF = "BackingOff"
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    BAD_CONFIGURATION = "BadConfiguration"
    AS_EXPECTED = "AsExpected"
    SUSPENDED = "Suspended"
    ROLLING_OUT = "RollingOut"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    NOT_STARTED = "NotStarted"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"


class EventReason(StrEnum):
    GROUP_READY = "GroupReady"
    GROUP_FAILED = "GroupFailed"
    GROUP_UNSCHEDULABLE = "GroupUnschedulable"
    """It held nodes for some of its stages only, gave them back and tries again."""
    IMAGE_PULL = "ImagePullFailed"
    NOT_STARTED = "GroupNotStarted"
    """A kubelet could not make the containers of one of its stages; it gave its nodes back and tries again."""
    GROUP_REPLACED = "GroupReplaced"
    """Its pods are drained because the template changed."""
    GROUP_REMOVED = "GroupRemoved"
    OBJECT_RESTORED = "ObjectRestored"
    """A Service, disruption budget or network policy of the model was edited by somebody else."""
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    RESTART_REQUESTED = "RestartRequested"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
