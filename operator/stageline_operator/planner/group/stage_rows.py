"""The rows of a group's status: one per stage, in pipeline order."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final

from stageline_api.resource.life.status import GroupStatus, StageObserved
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.obstacle import refusal_of
from stageline_operator.planner.observed.observed_pod import ObservedPod


class NotReady(StrEnum):
    """Why a stage is not ready, for stages without a failure class."""

    STARTING = "Starting"
    PREPARING = "Preparing"
    """The stage has not begun: its image is pulled, a volume is attached, or an init container runs."""
    ENDING = "Ending"
    NODE_LOST = "NodeLost"
    NODE_UNREACHABLE = "NodeUnreachable"
    """Its node is unreachable but does not count as lost: the pod is left unchanged."""
    NO_POD = "NoPod"


_LONGEST_MESSAGE: Final = 1000
_MESSAGES_OF_ALL: Final = 128 * 1024
"""The API server rejects objects over 1.5 MiB, and a model may have 4096 stages."""


def shorten_messages(groups: Sequence[GroupStatus]) -> tuple[GroupStatus, ...]:
    """Limit the total size of all rows' messages. Rows over the limit keep only their reason."""
    left, shortened = _MESSAGES_OF_ALL, []
    for group in groups:
        rows = []
        for row in group.stages:
            message = row.message[: min(_LONGEST_MESSAGE, left)]
            left -= len(message.encode())
            rows.append(row if message == row.message else row.model_copy(update={"message": message}))
            left = max(0, left)
        shortened.append(group.model_copy(update={"stages": tuple(rows)}))
    return tuple(shortened)


def stage_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> tuple[StageObserved, ...]:
    """Rows of the current incarnation, including stages without a pod."""
    pod_of = {pod.stage: pod for pod in pods if pod.incarnation == status.incarnation}
    return tuple(_row(context, status, stage, pod_of.get(stage)) for stage in range(context.stage_count(status)))


def _row(context: Context, status: GroupStatus, stage: int, pod: ObservedPod | None) -> StageObserved:
    if pod is None and (refusal := refusal_of(context, status, stage)) is not None:
        return StageObserved(index=stage, reason=refusal.failure_class, message=refusal.message, since=refusal.since)
    if pod is None:
        return StageObserved(index=stage, reason=NotReady.NO_POD, message="no pod")
    reason, message, since = _state(context, pod)
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


def _state(context: Context, pod: ObservedPod) -> tuple[str, str, datetime | None]:
    if pod.unheard:
        return NotReady.NODE_UNREACHABLE, f"node {pod.node}: {context.observed.unheard_why}", None
    if pod.lost:
        return NotReady.NODE_LOST, f"node {pod.node} is lost", None
    if pod.deleting:
        return NotReady.ENDING, f"ending: {pod.disruption}" if pod.disruption else "ending", None
    if pod.blocked is not None:
        where = f"{pod.blocked.container}: {pod.blocked.reason}: " if pod.blocked.container else ""
        return pod.blocked.failure_class, where + pod.blocked.message, pod.blocked.since
    if pod.before_start:
        return NotReady.PREPARING, pod.before_start, None
    return "" if pod.ready else NotReady.STARTING, pod.note, None


def _given_layers(context: Context, status: GroupStatus, stage: int) -> str:
    model = context.model_at(status.revision)
    return (model.spec.stages[stage].layers or "") if model is not None and model.spec.stages else ""
