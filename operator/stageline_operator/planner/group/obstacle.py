"""Obstacles that keep a group from becoming ready although no stage failed: no node, no image, no pod.

An obstacle explains why other stages of the group give up, and why the group releases its nodes. A pod that the API
server refuses, for a quota or an admission policy, is handled like a pod without a node.
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
    """The stage that does not start, and the reason; `blocked` is None if none is reported."""

    stage: int
    blocked: Blocked | None
    is_final: bool = False
    """Whether waiting is useless: the kubelet rejected the pod, and only a new pod may be accepted."""


def missing_stages(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[int]:
    present = {pod.stage for pod in pods}
    return [stage for stage in range(context.stage_count(status)) if stage not in present]


def refusal_of(context: Context, status: GroupStatus, stage: int) -> PodRefusal | None:
    """The API server's refusal to create the pod of a stage."""
    life = GroupIncarnation(status.index, status.incarnation)
    return context.observed.refused_pods.get(pod_name(context.model, life, stage))


def find_refusal(context: Context, status: GroupStatus, missing: Sequence[int]) -> tuple[int, PodRefusal] | None:
    """The first missing stage with a refused pod."""
    found = ((stage, refusal_of(context, status, stage)) for stage in missing)
    return next(((stage, refusal) for stage, refusal in found if refusal is not None), None)


def find_obstacle(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> Obstacle | None:
    """The group's obstacle: a rejected pod first, then a blocked one, then one that can't be created."""
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
