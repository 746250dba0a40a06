"""What keeps a group that never was ready from starting, through no fault of its stages: no node, no image, no pod.

An obstacle explains why others of the group give up waiting, and why it gives its places back. A pod that the API
server refuses, for a quota or an admission policy, is one like a pod without a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.objects import GroupIncarnation
from stageline_operator.planner.objects.identity import pod_name
from stageline_operator.planner.observed.observed_pod import Blocked, ObservedPod
from stageline_operator.planner.types import PodRefusal

REFUSALS: Final = (FailureClass.QUOTA_EXCEEDED, FailureClass.POD_REFUSED)


@dataclass(frozen=True)
class Obstacle:
    """The stage that does not start, and why; `blocked` None where nobody says."""

    stage: int
    blocked: Blocked | None
    is_final: bool = False
    """Whether waiting helps no more: its kubelet refused the pod, and only another one may be taken."""


def missing_stages(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[int]:
    present = {pod.stage for pod in pods}
    return [stage for stage in range(context.stage_count(status)) if stage not in present]


def refusal_of(context: Context, status: GroupStatus, stage: int) -> PodRefusal | None:
    """What the API server said when the pod of a stage was to be made."""
    life = GroupIncarnation(status.index, status.incarnation)
    return context.observed.refused_pods.get(pod_name(context.model, life, stage))


def find_refusal(context: Context, status: GroupStatus, missing: Sequence[int]) -> tuple[int, PodRefusal] | None:
    """The first of the missing stages whose pod is refused."""
    found = ((stage, refusal_of(context, status, stage)) for stage in missing)
    return next(((stage, refusal) for stage, refusal in found if refusal is not None), None)


def find_obstacle(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> Obstacle | None:
    """What is in the way of the group; a refused pod before a blocked one, and both before one that can't be made."""
    blocked = sorted((pod for pod in pods if pod.blocked is not None), key=lambda pod: not pod.refused)
    if blocked:
        return Obstacle(blocked[0].stage, blocked[0].blocked, is_final=blocked[0].refused)
    refused = find_refusal(context, status, missing_stages(context, status, pods))
    if refused is not None:
        stage, refusal = refused
        words = Blocked(refusal.failure_class, "", refusal.failure_class, refusal.message, refusal.since)
        return Obstacle(stage, words)
    unplaced = next((pod for pod in pods if not pod.placed), None)
    return None if unplaced is None else Obstacle(unplaced.stage, None)
