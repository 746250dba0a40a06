"""A stage that has not begun while the others already gave up waiting for it: what is kept, and who starts again. Pure.

Pulling an image or preparing the model may take one stage much longer than another. Its pod and its volumes are kept,
and the pods that waited in vain are made again in the same incarnation: none of them ever met a stage that had not
begun. They are at no fault, so no restart is used up.

A pod that is made again prepares again, unless its cache outlives it, and meanwhile the slow stage may begin and give
up in its turn. So whoever comes to a group that is there already waits for longer (`rendezvous_seconds`).
"""

from collections.abc import Sequence
from typing import Final

from stageline_api.conditions import EventReason
from stageline_api.failures import FailureClass, place_of
from stageline_api.resource.life.status import FailureRecord, GroupStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.cause import Failure
from stageline_operator.planner.group.stage_rows import NotReady
from stageline_operator.planner.objects.stage_pod import ENGINE_CONTAINER
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase, PlannedEvent

_NAMED: Final = 4
"""So many slow stages are named; a pipeline may have thousands."""


def slow_stages(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """Pods that explain why others waited in vain: nothing is wrong with them, and their stage has not begun."""
    waiting = (pod for pod in pods if pod.before_start and not (pod.ends or pod.lost or pod.deleting or pod.refused))
    return sorted(waiting, key=lambda pod: pod.stage)


def is_made_again(status: GroupStatus, pod: ObservedPod) -> bool:
    """Whether a pod is deleted only to be made again: nothing that it ended with counts."""
    return status.phase == GroupPhase.CREATING and pod.deleting and not pod.lost and not pod.disruption


def pods_to_make_again(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """Those that ended; with the engine, which they have talked to, all that have begun."""
    engine_ended = any(pod.stage == 0 and pod.ends for pod in pods)
    return [pod for pod in pods if pod.ends or (engine_ended and not pod.before_start)]


def rendezvous_seconds(model: PipelineModel) -> int:
    """How long a pod that comes to a group that is there already waits for the others: they may prepare once more."""
    timeouts = model.spec.timeouts
    return timeouts.rendezvous_seconds + timeouts.load_seconds


def slow_record(context: Context, status: GroupStatus, slow: Sequence[ObservedPod], cause: Failure) -> FailureRecord:
    """What goes on record: the first slow stage and what it does, the others, and who waited."""
    waits = [f"stage {pod.stage}: {pod.before_start}" for pod in slow[1:_NAMED]]
    if len(slow) > _NAMED:
        waits.append(f"{len(slow) - _NAMED} more stages have not begun")
    who = "the engine" if cause.end.container == ENGINE_CONTAINER else place_of(cause.end.stage, cause.rank)
    message = "; ".join([slow[0].before_start, *waits, f"{who} waited in vain: {cause.detail}"])
    return FailureRecord(
        time=context.now,
        group=status.index,
        incarnation=status.incarnation,
        stage=slow[0].stage,
        reason=NotReady.PREPARING,
        failure_class=FailureClass.NOT_STARTED,
        message=message,
    )


def slow_event(record: FailureRecord) -> PlannedEvent:
    message = f"stage {record.stage} of group {record.group} has not begun: {record.message}"
    consequence = "its pod is kept, those that waited are made again, and no restart is used up"
    return PlannedEvent("Warning", EventReason.NOT_STARTED, f"{message}; {consequence}")
