"""One group's next step in the phase ladder; a pass takes at most one step.

    Creating -> Starting <-> Ready -> (a container ends) -> Terminating -> BackingOff -> Creating, incarnation + 1
                          |        -> (budget spent or bad configuration) -> Failed -> (template changes) -> Replacing
                          |        -> (its turn in a rollout) -> Replacing -> Creating, incarnation + 1
                          -> (only some stages find a node) -> Waiting -> Creating, incarnation + 1
                          -> (peers gave up on a stage that has not begun) -> Creating, the same incarnation
    any of them -> (no longer wanted) -> Draining -> removed

Invariants: no pod of an incarnation is created while a pod of another incarnation may still run; an incarnation is
recorded in the status before its pods are created; incarnations only increase. The group does not wait for a pod that
is over (`ObservedPod.is_over`): its kubelet only has to clean up. `failure` finds why a group failed; every phase
change is made here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stageline_api.conditions import EventReason
from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import FailureRecord, GroupStatus
from stageline_operator.planner.context import Context, default_image_of, images_to_record, vllm_images_of
from stageline_operator.planner.group.cause import Failure, Settling, find_cause
from stageline_operator.planner.group.failure import (
    blocked_event,
    blocked_record,
    cause_record,
    decide_after_eviction,
    decide_restart,
    failure_sentence,
    first_blocked_record,
    is_eviction,
    name_lost_node,
    spent_sentence,
    unreported_ends,
)
from stageline_operator.planner.group.gang import held_until, keeps_its_place, next_try
from stageline_operator.planner.group.obstacle import Obstacle, find_obstacle, find_refusal, missing_stages
from stageline_operator.planner.group.slow_stage import (
    is_made_again,
    pods_to_make_again,
    rendezvous_seconds,
    slow_event,
    slow_record,
    slow_stages,
)
from stageline_operator.planner.group.stage_rows import stage_rows
from stageline_operator.planner.objects import GroupIncarnation, build_stage_pod
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.rollout import Turn
from stageline_operator.planner.types import Deletion, GroupPhase, PlannedEvent

FAILED_GROUP_GRACE_SECONDS: Final = 3.0
"""A failed group has lost its requests already. This grace period only lets processes write their termination message.
"""
STRAY_GRACE_SECONDS: Final = 1.0
"""For pods of an earlier incarnation. Not 0, which would not wait for their processes to end."""
_SETTLED: frozenset[GroupPhase] = frozenset({GroupPhase.TERMINATING, GroupPhase.REPLACING, GroupPhase.DRAINING})
"""Phases whose pods are already ending: the group waits for that first."""


@dataclass(frozen=True)
class GroupStep:
    """The step of one group in one pass. `status` None: the group is removed."""

    status: GroupStatus | None
    apply: tuple[dict[str, Any], ...] = ()
    delete: tuple[Deletion, ...] = ()
    failure: FailureRecord | None = None
    requeue_after_seconds: float | None = None
    events: tuple[PlannedEvent, ...] = ()


def plan_group(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], turn: Turn, first_unplaced: int | None
) -> GroupStep:
    """Next step of a recorded group; `pods` are all of its pods, of any incarnation.

    `first_unplaced` is the lowest index among the groups of its revision that have stages without a node.
    """
    step = _next_step(context, status, pods, turn, first_unplaced)
    if step.status is None or step.status.incarnation != status.incarnation:
        return step  # a new incarnation has its rows already and no pods yet
    return replace(step, status=_with_rows(context, step.status, pods))


def _next_step(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], turn: Turn, first_unplaced: int | None
) -> GroupStep:
    phase = phase_of(status)
    if turn is Turn.REMOVE or phase is GroupPhase.DRAINING:
        return _remove(context, status, pods)
    strays = _holding([pod for pod in pods if pod.incarnation != status.incarnation])
    if strays:
        return GroupStep(status, delete=delete_pods(strays, STRAY_GRACE_SECONDS))
    pods = [pod for pod in pods if pod.incarnation == status.incarnation]
    if turn is Turn.REPLACE and phase not in _SETTLED:
        return _start_replacing(context, status, pods)
    match phase:
        case GroupPhase.CREATING | GroupPhase.STARTING | GroupPhase.READY:
            return _run(context, status, pods, first_unplaced)
        case GroupPhase.TERMINATING:
            return _terminate(context, status, pods)
        case GroupPhase.BACKING_OFF | GroupPhase.WAITING:
            return _try_again_later(context, status, pods, first_unplaced)
        case GroupPhase.FAILED:
            return _stay_failed(context, status, pods)
        case GroupPhase.REPLACING:
            return _finish_replacing(context, status, pods)


def _start_replacing(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    message = f"group {status.index} (incarnation {status.incarnation}) is drained: the template has changed"
    event = PlannedEvent("Normal", EventReason.GROUP_REPLACED, message)
    replacing = _enter(context, status, GroupPhase.REPLACING)
    deletions = delete_pods(pods, grace_seconds=None)
    return GroupStep(replacing, delete=deletions, requeue_after_seconds=0.0, events=(event,))


def _run(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], first_unplaced: int | None) -> GroupStep:
    counted = [pod for pod in pods if not is_made_again(status, pod)]
    ends = [end for pod in counted for end in pod.ends] + unreported_ends(context, status, counted)
    cause = find_cause(ends, context.now)
    obstacle = find_obstacle(context, status, pods)
    is_explained = not isinstance(cause, Failure) or cause.is_explained_by_others
    if obstacle is not None and obstacle.is_final and is_explained:
        return _release_nodes(context, status, pods, obstacle)
    if isinstance(cause, Settling):
        return GroupStep(status, requeue_after_seconds=cause.seconds)
    if cause is not None:
        return _end(context, status, pods, cause, obstacle)
    missing = missing_stages(context, status, pods)
    if missing and find_refusal(context, status, missing) is None:
        return _make(context, status, pods, missing)
    return _stand_by(context, status, pods, obstacle, is_first=first_unplaced == status.index)


def _end(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], cause: Failure, obstacle: Obstacle | None
) -> GroupStep:
    """A container ended: the group fails, unless it was never ready and another stage's wait explains the end."""
    if status.phase != GroupPhase.READY and cause.is_explained_by_others:
        if obstacle is not None and obstacle.blocked is not None:
            return _release_nodes(context, status, pods, obstacle)
        slow = slow_stages(pods)
        if slow and cause.failure_class is not FailureClass.EVICTED:
            return _wait_for_slow(context, status, pods, slow, cause)
    return _fail(context, status, pods, cause)


def _wait_for_slow(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], slow: Sequence[ObservedPod], cause: Failure
) -> GroupStep:
    """Keep the stages that have not begun, and recreate the pods that waited for them."""
    record = slow_record(context, status, slow, cause)
    deletions = delete_pods(pods_to_make_again(pods), FAILED_GROUP_GRACE_SECONDS)
    creating = _enter(context, status, GroupPhase.CREATING)
    return GroupStep(creating, failure=record, delete=deletions, events=(slow_event(record),))


def _stand_by(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], obstacle: Obstacle | None, is_first: bool
) -> GroupStep:
    """Nothing has failed and no pod can be created now: wait for nodes, quota and containers, for a limited time."""
    limit = held_until(context, status, pods, is_first)
    if limit is not None and context.now >= limit and obstacle is not None:
        return _release_nodes(context, status, pods, obstacle)
    missing = missing_stages(context, status, pods)
    refused = find_refusal(context, status, missing)
    if refused is not None and refused[1].retry_at <= context.now:
        return _make(context, status, pods, missing)
    record = None if obstacle is None else first_blocked_record(context, status, obstacle)
    waits = [] if limit is None else [max(0.0, (limit - context.now).total_seconds())]
    waits += [record.seconds] if isinstance(record, Settling) else []
    if refused is not None:
        waits.append((refused[1].retry_at - context.now).total_seconds())
    being_made = missing or any(is_made_again(status, pod) for pod in pods)
    step = GroupStep(status) if being_made else _watch(context, status, pods)
    step = replace(step, requeue_after_seconds=min(waits, default=None))
    if not isinstance(record, FailureRecord):
        return step
    return replace(step, failure=record, events=(*step.events, blocked_event(record)))


def _make(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], missing: Sequence[int]) -> GroupStep:
    """Create the missing pods."""
    model = context.model_at(status.revision)
    if model is None:
        # Its revision is unknown, so its missing pods can't be created: replace the group at the current revision.
        return GroupStep(_enter(context, status, GroupPhase.REPLACING), requeue_after_seconds=0.0)
    life = GroupIncarnation(status.index, status.incarnation)
    image, vllm_images = default_image_of(context, status), vllm_images_of(context, status)
    setting, patience = context.setting, rendezvous_seconds(model) if pods else None
    rest = (status.revision, image, setting.tracing_env, setting.pod_host, vllm_images, patience)
    return GroupStep(status, apply=tuple(build_stage_pod(model, life, stage, *rest) for stage in missing))


def _watch(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if not all(pod.ready for pod in pods):
        return GroupStep(_enter(context, status, GroupPhase.STARTING))
    if status.phase == GroupPhase.READY:
        return GroupStep(status.model_copy(update={"served": True}))
    message = f"group {status.index} (incarnation {status.incarnation}) is ready"
    event = PlannedEvent("Normal", EventReason.GROUP_READY, message)
    return GroupStep(_enter(context, status, GroupPhase.READY, attempts=0, served=True), events=(event,))


def _fail(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], cause: Failure) -> GroupStep:
    """Use one restart, unless the group was evicted: replace the group after its back-off, or leave it down."""
    attempts = status.attempts + 1
    policy, evicted = context.model.spec.restart, is_eviction(cause, pods)
    decision = (decide_after_eviction if evicted else decide_restart)(status, policy, context.now)
    # Evictions and incarnations that found no node count as attempts but not as the group's own failures.
    record = cause_record(status, cause, min(attempts, len(decision.recent) + 1))
    used_up = () if evicted or decision.at is None else (context.now,)
    is_final = cause.failure_class is FailureClass.BAD_CONFIG or decision.at is None
    failed = _enter(
        context,
        status,
        GroupPhase.FAILED if is_final else GroupPhase.TERMINATING,
        restarts=(*decision.recent, *used_up),
        attempts=attempts,
        backoff_until=None if is_final else decision.at,
    )
    # An eviction ends a working group: its requests may finish, as in a drain.
    grace_seconds = None if cause.failure_class is FailureClass.EVICTED else FAILED_GROUP_GRACE_SECONDS
    events = [PlannedEvent("Warning", EventReason.GROUP_FAILED, failure_sentence(record))]
    if decision.at is None and cause.failure_class is not FailureClass.BAD_CONFIG:
        spent = f"group {status.index} stays down: {spent_sentence(len(decision.recent))}"
        events.append(PlannedEvent("Warning", EventReason.RESTART_BUDGET_SPENT, spent))
    return GroupStep(failed, failure=record, delete=delete_pods(pods, grace_seconds), events=tuple(events))


def _release_nodes(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], obstacle: Obstacle) -> GroupStep:
    """Delete all pods because a stage can't start, and try again later.

    It costs no restart: no stage of the group failed. Other groups can use the nodes and the quota that it held.
    """
    waiting = _enter(
        context, status, GroupPhase.WAITING, attempts=status.attempts + 1, backoff_until=next_try(context, status)
    )
    record = blocked_record(context, status, obstacle)
    event = blocked_event(record, "the group releases its nodes and tries again")
    return GroupStep(waiting, failure=record, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS), events=(event,))


def _terminate(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if holding := _holding(pods):
        failure = name_lost_node(context, status, pods)
        return GroupStep(status, delete=delete_pods(holding, FAILED_GROUP_GRACE_SECONDS), failure=failure)
    return GroupStep(_enter(context, status, GroupPhase.BACKING_OFF), requeue_after_seconds=0.0)


def _try_again_later(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], first_unplaced: int | None
) -> GroupStep:
    """Create the next incarnation after the back-off, which a restart request or a rollout ends early."""
    if holding := _holding(pods):
        return GroupStep(status, delete=delete_pods(holding, FAILED_GROUP_GRACE_SECONDS))
    until = status.backoff_until
    if until is not None and context.now < until and not context.restart_requested:
        return GroupStep(status, requeue_after_seconds=(until - context.now).total_seconds())
    if status.phase == GroupPhase.WAITING and not keeps_its_place(status, first_unplaced):
        return GroupStep(status)  # reconciled again when the preceding group finds its nodes or changes its state
    # Keep its own revision while that is known: the rollout updates it later.
    is_known = context.model_at(status.revision) is not None
    return begin(context, status, status.revision if is_known else context.revision)


def _stay_failed(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if context.restart_requested:
        fresh = _enter(context, status, GroupPhase.REPLACING, restarts=(), attempts=0)
        return GroupStep(fresh, requeue_after_seconds=0.0)
    return GroupStep(status, delete=delete_pods(pods, FAILED_GROUP_GRACE_SECONDS))


def _finish_replacing(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if holding := _holding(pods):
        return GroupStep(status, delete=delete_pods(holding, grace_seconds=None))
    return begin(context, status, context.revision)


def _remove(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    """Drain a group that is no longer wanted; without pods it is removed."""
    if not pods:
        return GroupStep(None)
    deletions = delete_pods(pods, grace_seconds=None)
    if status.phase == GroupPhase.DRAINING:
        return GroupStep(status, delete=deletions)
    event = PlannedEvent("Normal", EventReason.GROUP_REMOVED, f"group {status.index} is drained and removed")
    return GroupStep(_enter(context, status, GroupPhase.DRAINING), delete=deletions, events=(event,))


def begin(context: Context, status: GroupStatus, revision: str) -> GroupStep:
    """Record the next incarnation; the next pass creates its pods."""
    update: dict[str, Any] = {
        "incarnation": status.incarnation + 1,
        "revision": revision,
        **images_to_record(context, revision),
        "backoff_until": None,
        "since": context.now,
        "phase": GroupPhase.CREATING,
    }
    if revision != status.revision:
        update |= {"restarts": (), "attempts": 0, "served": False}
    return GroupStep(_with_rows(context, status.model_copy(update=update), ()), requeue_after_seconds=0.0)


def _holding(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    """Pods in which a process may still run, so that they hold nodes, devices and addresses."""
    return [pod for pod in pods if not pod.is_over]


def delete_pods(pods: Sequence[ObservedPod], grace_seconds: float | None) -> tuple[Deletion, ...]:
    """Delete pods that aren't being deleted yet. Pods of a lost node skip the grace period: their kubelet can't
    confirm.
    """
    return tuple(
        Deletion("Pod", pod.name, 0.0 if pod.lost else grace_seconds) for pod in pods if pod.lost or not pod.deleting
    )


def phase_of(status: GroupStatus) -> GroupPhase:
    """The recorded phase. A phase that this version does not know becomes Starting, and the pods decide."""
    try:
        return GroupPhase(status.phase)
    except ValueError:
        return GroupPhase.STARTING


def _enter(context: Context, status: GroupStatus, phase: GroupPhase, **update: Any) -> GroupStatus:
    """Set the group's phase; `since` stays if the phase does."""
    since = status.since if status.phase == phase and status.since is not None else context.now
    return status.model_copy(update={"phase": phase, "since": since, **update})


def _with_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStatus:
    return status.model_copy(update={"stages": stage_rows(context, status, pods)})
