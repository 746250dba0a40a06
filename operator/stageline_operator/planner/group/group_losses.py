"""Ends of a group that no container tells of: pods that are gone, whose node is lost, or that somebody else deletes."""

from collections.abc import Sequence

from stageline_api.failures import FailureClass
from stageline_api.resource.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.objects import GroupIncarnation
from stageline_operator.planner.objects.identity import pod_name
from stageline_operator.planner.observed.container_end import ContainerEnd
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase


def missing_stages(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[int]:
    """Stages that have no pod."""
    present = {pod.stage for pod in pods}
    return [stage for stage in range(context.stage_count(status)) if stage not in present]


def losses(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[ContainerEnd]:
    """An end for each stage that was there and is not, or won't be for long."""
    ends = [_end(context, pod.stage, FailureClass.NODE_LOST, f"node {pod.node} is lost") for pod in pods if pod.lost]
    for pod in pods:
        if pod.deleting and not pod.lost:
            why = f"pod {pod.name} is being deleted" + (f": {pod.disruption}" if pod.disruption else "")
            ends.append(_end(context, pod.stage, FailureClass.EVICTED, why))
    if status.phase != GroupPhase.CREATING:
        life = GroupIncarnation(status.index, status.incarnation)
        for stage in missing_stages(context, status, pods):
            why = f"pod {pod_name(context.model, life, stage)} was deleted or lost"
            ends.append(_end(context, stage, FailureClass.NODE_LOST, why))
    return ends


def _end(context: Context, stage: int, reason: FailureClass, message: str) -> ContainerEnd:
    return ContainerEnd(stage, "", None, 0, reason, message, context.now)
