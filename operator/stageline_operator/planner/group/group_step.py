"""What one pass does about one group, and the small parts that all rungs of its ladder share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stageline_api.conditions import EventReason
from stageline_api.resource.status import FailureRecord, GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.stage_rows import stage_rows
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import Deletion, GroupPhase, PlannedEvent

FAILED_GROUP_GRACE_SECONDS: Final = 3.0
"""A failed group has lost its answers already; a short grace only lets processes say their last words."""
STRAY_GRACE_SECONDS: Final = 1.0
"""Pods of a life that is over. Not 0, which would not wait for their processes to be gone."""


@dataclass(frozen=True)
class GroupStep:
    """What one pass does about one group. `status` None: the group is gone."""

    status: GroupStatus | None
    apply: tuple[dict[str, Any], ...] = ()
    delete: tuple[Deletion, ...] = ()
    failure: FailureRecord | None = None
    requeue_after_seconds: float | None = None
    events: tuple[PlannedEvent, ...] = ()

    def seen(self, context: Context, pods: Sequence[ObservedPod]) -> "GroupStep":
        """The step with the rows of its status filled in from what is observed."""
        return self if self.status is None else replace(self, status=with_rows(context, self.status, pods))


def phase_of(status: GroupStatus) -> GroupPhase:
    """The phase on record; one that this version does not know is judged anew from the pods."""
    try:
        return GroupPhase(status.phase)
    except ValueError:
        return GroupPhase.STARTING


def enter(context: Context, status: GroupStatus, phase: GroupPhase, **update: Any) -> GroupStatus:
    """The group in another phase, since now; in the phase it is in, `since` stays."""
    since = status.since if status.phase == phase and status.since is not None else context.now
    return status.model_copy(update={"phase": phase, "since": since, **update})


def with_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStatus:
    """The group with one row for each of its stages."""
    return status.model_copy(update={"stages": stage_rows(context, status, pods)})


def begin(context: Context, status: GroupStatus, revision: str) -> GroupStep:
    """Put the next incarnation on record; its pods are made in the next pass."""
    update: dict[str, Any] = {
        "incarnation": status.incarnation + 1,
        "revision": revision,
        "image": context.setting.default_image,
        "backoff_until": None,
        "since": context.now,
        "phase": GroupPhase.CREATING,
    }
    if revision != status.revision:
        update |= {"restarts": (), "attempts": 0}
    return GroupStep(with_rows(context, status.model_copy(update=update), ()), requeue_after_seconds=0.0)


def delete_pods(pods: Sequence[ObservedPod], grace_seconds: float | None) -> tuple[Deletion, ...]:
    """Delete pods that aren't being deleted yet. Those of a lost node go at once: their kubelet won't confirm."""
    return tuple(
        Deletion("Pod", pod.name, 0.0 if pod.lost else grace_seconds) for pod in pods if pod.lost or not pod.deleting
    )


def remove(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    """Drain a group that is not wanted any more; without pods it is gone."""
    if not pods:
        return GroupStep(None)
    if status.phase == GroupPhase.DRAINING:
        return GroupStep(status, delete=delete_pods(pods, grace_seconds=None)).seen(context, pods)
    event = PlannedEvent("Normal", EventReason.GROUP_REMOVED, f"group {status.index} is drained and removed")
    draining = enter(context, status, GroupPhase.DRAINING)
    return GroupStep(draining, delete=delete_pods(pods, grace_seconds=None), events=(event,)).seen(context, pods)
