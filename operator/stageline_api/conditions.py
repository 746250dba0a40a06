"""Condition types and reasons of a PipelineModel, in metav1 form."""

from enum import StrEnum


class ConditionType(StrEnum):
    """The conditions every PipelineModel carries."""

    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    READY = "Ready"


class Reason(StrEnum):
    """CamelCase reasons used in conditions and Events."""

    ALL_GROUPS_READY = "AllGroupsReady"
    GROUPS_NOT_READY = "GroupsNotReady"
    GROUPS_STARTING = "GroupsStarting"
    GROUP_FAILED = "GroupFailed"
    BACKING_OFF = "BackingOff"
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    BAD_CONFIGURATION = "BadConfiguration"
    AS_EXPECTED = "AsExpected"
