"""The rows of a group's status: one for each stage, in pipeline order."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from stageline_api.resource.status import GroupStatus, StageObserved
from stageline_operator.planner.context import Context
from stageline_operator.planner.observed.observed_pod import ObservedPod


class NotReady(StrEnum):
    """Why a stage is not ready, where no failure class says it."""

    STARTING = "Starting"
    ENDING = "Ending"
    NODE_LOST = "NodeLost"
    NO_POD = "NoPod"


def stage_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> tuple[StageObserved, ...]:
    """Rows of the current incarnation, also for stages that have no pod."""
    pod_of = {pod.stage: pod for pod in pods if pod.incarnation == status.incarnation}
    return tuple(_row(context, status, stage, pod_of.get(stage)) for stage in range(context.stage_count(status)))


def _row(context: Context, status: GroupStatus, stage: int, pod: ObservedPod | None) -> StageObserved:
    if pod is None:
        return StageObserved(index=stage, reason=NotReady.NO_POD, message="no pod")
    reason, message, since = _state(pod)
    return StageObserved(
        index=stage,
        pod=pod.name,
        node=pod.node,
        layers=context.observed.layers_of_pod.get(pod.name, _given_layers(context, status, stage)),
        ready=pod.ready,
        reason=reason,
        message=message,
        since=since,
    )


def _state(pod: ObservedPod) -> tuple[str, str, datetime | None]:
    if pod.lost:
        return NotReady.NODE_LOST, f"node {pod.node} is lost", None
    if pod.deleting:
        return NotReady.ENDING, f"ending: {pod.disruption}" if pod.disruption else "ending", None
    if pod.blocked is not None:
        where = f"{pod.blocked.container}: {pod.blocked.reason}: " if pod.blocked.container else ""
        return pod.blocked.failure_class, where + pod.blocked.message, pod.blocked.since
    return "" if pod.ready else NotReady.STARTING, pod.note, None


def _given_layers(context: Context, status: GroupStatus, stage: int) -> str:
    model = context.model_at(status.revision)
    return (model.spec.stages[stage].layers or "") if model is not None and model.spec.stages else ""
