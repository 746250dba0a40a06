"""A stage that has not begun when the other stages already gave up waiting for it: which pods stay, which are
recreated. Pure.

Pulling an image or preparing the model may take one stage much longer than the others. The slow stage keeps its pod and
volumes. The pods that gave up are recreated in the same incarnation: none of them has connected to the slow stage. None
of them failed, so no restart is used.

A recreated pod prepares the model again, unless its cache outlives the pod. The slow stage may begin in that time and
give up too. So a pod that joins an existing group waits longer (`rendezvous_seconds`).
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
"""Limit on the slow stages named in a message; a pipeline may have thousands."""


def slow_stages(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """Pods that explain why others gave up: they are healthy, but their stage has not begun."""
    waiting = (pod for pod in pods if pod.before_start and not (pod.ends or pod.lost or pod.deleting or pod.refused))
    return sorted(waiting, key=lambda pod: pod.stage)


def is_made_again(status: GroupStatus, pod: ObservedPod) -> bool:
    """Whether a pod is deleted only to be recreated, so that its ends don't count."""
    return status.phase == GroupPhase.CREATING and pod.deleting and not pod.lost and not pod.disruption


def pods_to_make_again(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """The pods that ended. If the engine's pod did, all pods that have begun: they have talked to it."""
    engine_ended = any(pod.stage == 0 and pod.ends for pod in pods)
    return [pod for pod in pods if pod.ends or (engine_ended and not pod.before_start)]


def rendezvous_seconds(model: PipelineModel) -> int:
    """How long a pod that joins an existing group waits for the others, which may have to prepare again."""
    timeouts = model.spec.timeouts
    return timeouts.rendezvous_seconds + timeouts.load_seconds


def slow_record(context: Context, status: GroupStatus, slow: Sequence[ObservedPod], cause: Failure) -> FailureRecord:
    """The failure record: the first slow stage and its activity, the other slow stages, and which stage waited."""
    waits = [f"stage {pod.stage}: {pod.before_start}" for pod in slow[1:_NAMED]]
    if len(slow) > _NAMED:
        waits.append(f"{len(slow) - _NAMED} more stages have not begun")
    who = "the engine" if cause.end.container == ENGINE_CONTAINER else place_of(cause.end.stage, cause.rank)
    message = "; ".join([slow[0].before_start, *waits, f"{who} timed out: {cause.detail}"])
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
    consequence = "its pod is kept, the pods that timed out are recreated, and no restart is used"
    return PlannedEvent("Warning", EventReason.NOT_STARTED, f"{message}; {consequence}")
