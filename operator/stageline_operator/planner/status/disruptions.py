"""How many ready pods an eviction must leave: one group may be lost at a time, since each eviction costs a whole one.

A budget counts pods, and pods of one model are alike to it, so the number follows what is ready: all of it but one pod.
While a lost group is on its way back, nothing more may go. One that is not on its way, because it is left down, finds
no room or is overdue, must not keep a node from draining.
"""

from collections.abc import Sequence
from typing import Final

from stageline_api.conditions import ConditionType, Reason
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase

_COMING_BACK: Final = (
    GroupPhase.CREATING,
    GroupPhase.STARTING,
    GroupPhase.TERMINATING,
    GroupPhase.BACKING_OFF,
    GroupPhase.REPLACING,
)


def kept_pods(status: PipelineModelStatus, pods: Sequence[ObservedPod], wanted_groups: int) -> int:
    """`status` is the one that is about to be written."""
    ready = sum(pod.ready and not pod.deleting for pod in pods)
    progressing = next((each for each in status.conditions if each.type == ConditionType.PROGRESSING), None)
    is_overdue = progressing is not None and progressing.reason == Reason.PROGRESS_DEADLINE_EXCEEDED
    comes_back = any(group.phase in _COMING_BACK for group in status.groups) and not is_overdue
    may_go = 0 if comes_back and status.ready_replicas < wanted_groups else 1
    return max(0, ready - may_go)
