"""One group's next step: a ladder of states, one rung per pass.

    Creating -> Starting <-> Ready -> (a container ends) -> Terminating -> BackingOff -> Creating, incarnation + 1
                          |        -> (budget spent or bad configuration) -> Failed -> (spec changes) -> Replacing
                          |        -> (its turn in a rollout) -> Replacing -> Creating, incarnation + 1
                          -> (only some stages find a node) -> Waiting -> Creating, incarnation + 1
    any of them -> (not wanted any more) -> Draining -> gone

Invariants: no pod of an incarnation is made while a pod of another one exists; an incarnation is on record before its
pods are made; incarnations only rise.
"""

from collections.abc import Sequence
from dataclasses import replace

from stageline_api.conditions import EventReason
from stageline_api.failures import FailureClass
from stageline_api.resource.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.cause import Settling, find_cause
from stageline_operator.planner.group.gang import held_until, keeps_its_place
from stageline_operator.planner.group.group_failure import Refusal, fail, give_back, name_lost_node, refusal
from stageline_operator.planner.group.group_losses import losses, missing_stages
from stageline_operator.planner.group.group_step import (
    FAILED_GROUP_GRACE_SECONDS,
    STRAY_GRACE_SECONDS,
    GroupStep,
    begin,
    delete_pods,
    enter,
    phase_of,
    remove,
)
from stageline_operator.planner.group.restart_policy import recent_restarts
from stageline_operator.planner.objects import GroupIncarnation, build_stage_pod
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.roster import Turn
from stageline_operator.planner.types import GroupPhase, PlannedEvent

_SETTLED: frozenset[GroupPhase] = frozenset({GroupPhase.TERMINATING, GroupPhase.REPLACING, GroupPhase.DRAINING})
"""Phases whose pods are ending already: they run to their end before anything else."""


def plan_group(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], turn: Turn, first_unplaced: int | None
) -> GroupStep:
    """Next step of a group on record; `pods` are all of its pods, of any incarnation.

    `first_unplaced` is the lowest index of a group that has no node for some of its stages.
    """
    phase = phase_of(status)
    if turn is Turn.REMOVE or phase is GroupPhase.DRAINING:
        return remove(context, status, pods)
    strays = [pod for pod in pods if pod.incarnation != status.incarnation]
    if strays:
        return GroupStep(status, delete=delete_pods(strays, STRAY_GRACE_SECONDS)).seen(context, pods)
    if turn is Turn.REPLACE and phase not in _SETTLED:
        return _start_replacing(context, status, pods)
    step = _climb(context, status, pods, first_unplaced)
    # A new incarnation has rows of its own already, and none of its pods is here.
    return step if step.status is None or step.status.incarnation != status.incarnation else step.seen(context, pods)


def _climb(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], first_unplaced: int | None) -> GroupStep:
    """The rung that the phase on record stands for."""
    match phase_of(status):
        case GroupPhase.CREATING | GroupPhase.STARTING | GroupPhase.READY:
            return _run(context, status, pods, first_unplaced)
        case GroupPhase.REPLACING:
            return _after_pods_are_gone(context, status, pods)
        case GroupPhase.TERMINATING:
            return _terminate(context, status, pods)
        case GroupPhase.BACKING_OFF:
            return _back_off(context, status, pods)
        case GroupPhase.WAITING:
            return _wait(context, status, pods, first_unplaced)
        case GroupPhase.FAILED:
            return _stay_failed(context, status, pods)
        case GroupPhase.DRAINING:
            return remove(context, status, pods)


def _start_replacing(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    message = f"group {status.index} (incarnation {status.incarnation}) is drained: the template has changed"
    event = PlannedEvent("Normal", EventReason.GROUP_REPLACED, message)
    replacing = enter(context, status, GroupPhase.REPLACING)
    deletions = delete_pods(pods, grace_seconds=None)
    return GroupStep(replacing, delete=deletions, requeue_after_seconds=0.0, events=(event,)).seen(context, pods)


def _run(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], first_unplaced: int | None) -> GroupStep:
    ends = [end for pod in pods for end in pod.ends] + losses(context, status, pods)
    cause = find_cause(ends, context.now)
    blocked = next((pod for pod in pods if pod.blocked is not None), None)
    if isinstance(cause, Settling):
        return GroupStep(status, requeue_after_seconds=cause.seconds)
    if cause is not None:
        never_started = status.phase != GroupPhase.READY
        if never_started and blocked is not None and (cause.is_consequence or cause.is_waiting_in_vain):
            return give_back(context, status, pods, blocked)
        if never_started and cause.failure_class is FailureClass.UNSCHEDULABLE:
            return give_back(context, status, pods, next(pod for pod in pods if pod.stage == cause.end.stage))
        return fail(context, status, pods, cause)
    missing = missing_stages(context, status, pods)
    if missing:
        return _make(context, status, missing)
    return _stand_by(context, status, pods, blocked, is_first=first_unplaced == status.index)


def _stand_by(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], blocked: ObservedPod | None, is_first: bool
) -> GroupStep:
    """All pods are there and none has failed: wait for their nodes and containers, but not for ever."""
    limit = held_until(context, status, pods, is_first)
    if limit is not None and context.now >= limit:
        return give_back(context, status, pods, next(pod for pod in pods if not pod.placed))
    refused = None if blocked is None else refusal(context, status, blocked)
    waits = [] if limit is None else [(limit - context.now).total_seconds()]
    waits += [refused.seconds] if isinstance(refused, Settling) else []
    step = replace(_watch(context, status, pods), requeue_after_seconds=min(waits, default=None))
    if not isinstance(refused, Refusal):
        return step
    return replace(step, failure=refused.record, events=(*step.events, refused.event))


def _make(context: Context, status: GroupStatus, missing: Sequence[int]) -> GroupStep:
    model = context.model_at(status.revision)
    if model is None:
        # Its revision is not known any more, so that its missing pods can't be made: only the current one can.
        return GroupStep(enter(context, status, GroupPhase.REPLACING), requeue_after_seconds=0.0)
    life = GroupIncarnation(status.index, status.incarnation)
    image = status.image or context.setting.default_image
    tracing = context.setting.tracing_env
    return GroupStep(
        status, apply=tuple(build_stage_pod(model, life, stage, status.revision, image, tracing) for stage in missing)
    )


def _watch(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if not all(pod.ready for pod in pods):
        return GroupStep(enter(context, status, GroupPhase.STARTING))
    if status.phase == GroupPhase.READY:
        return GroupStep(status)
    message = f"group {status.index} (incarnation {status.incarnation}) is ready"
    event = PlannedEvent("Normal", EventReason.GROUP_READY, message)
    return GroupStep(enter(context, status, GroupPhase.READY, attempts=0), events=(event,))


def _terminate(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if pods:
        failure = name_lost_node(context, status, pods)
        return GroupStep(status, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS), failure=failure)
    return GroupStep(enter(context, status, GroupPhase.BACKING_OFF), requeue_after_seconds=0.0)


def _back_off(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if pods:
        return GroupStep(status, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS))
    until = status.backoff_until
    if until is not None and context.now < until and not context.tries_again:
        return GroupStep(status, requeue_after_seconds=(until - context.now).total_seconds())
    restarts = (*recent_restarts(status.restarts, context.model.spec.restart, context.now), context.now)
    return begin(context, status.model_copy(update={"restarts": restarts}), _own_revision(context, status))


def _wait(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], first_unplaced: int | None) -> GroupStep:
    if pods:
        return GroupStep(status, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS))
    until = status.backoff_until
    if until is not None and context.now < until and not context.tries_again:
        return GroupStep(status, requeue_after_seconds=(until - context.now).total_seconds())
    if not keeps_its_place(status, first_unplaced):
        return GroupStep(status)  # woken when the group before it finds its nodes or changes its state
    return begin(context, status, _own_revision(context, status))


def _stay_failed(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if context.tries_again:
        fresh = enter(context, status, GroupPhase.REPLACING, restarts=(), attempts=0)
        return GroupStep(fresh, requeue_after_seconds=0.0)
    return GroupStep(status, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS))


def _after_pods_are_gone(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if pods:
        return GroupStep(status, delete=delete_pods(pods, grace_seconds=None))
    return begin(context, status, context.revision)


def _own_revision(context: Context, status: GroupStatus) -> str:
    """The revision a group is made again at: its own, where that is still known; its turn for another comes later."""
    return status.revision if context.model_at(status.revision) is not None else context.revision
