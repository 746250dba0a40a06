"""What follows when a group can't go on: the record of its cause, and what becomes of the group.

`fail` uses up a restart. `give_back` does not: no stage of the group was at fault, there was no room for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageline_api.conditions import EventReason
from stageline_api.failures import CONSEQUENCES, FailureClass
from stageline_api.resource.status import FailureRecord, GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.cause import Failure, Settling
from stageline_operator.planner.group.gang import next_try
from stageline_operator.planner.group.group_step import FAILED_GROUP_GRACE_SECONDS, GroupStep, delete_pods, enter
from stageline_operator.planner.group.restart_policy import decide_restart
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase, PlannedEvent

CRASH_LOOP_ATTEMPTS: Final = 3
"""Incarnations in a row that ended before they were ready, after which an end without a class counts as a loop."""
NOT_STARTED_SECONDS: Final = 10.0
"""How long a kubelet may wait for what a stage's containers need before that goes on record: it may be on its way."""
_CLASSLESS: Final = frozenset({FailureClass.INTERNAL, FailureClass.KILLED})
_EXPLAINED_BY_A_LOST_NODE: Final = CONSEQUENCES | {FailureClass.STEP_TIMEOUT}

_EVENT_OF_CLASS: Final = {
    FailureClass.UNSCHEDULABLE: EventReason.GROUP_UNSCHEDULABLE,
    FailureClass.IMAGE_PULL: EventReason.IMAGE_PULL,
    FailureClass.NOT_STARTED: EventReason.NOT_STARTED,
}


@dataclass(frozen=True)
class Refusal:
    """What a group waits for and its kubelets can't get, as it goes on record."""

    record: FailureRecord
    event: PlannedEvent


def fail(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], cause: Failure) -> GroupStep:
    """End an incarnation for a cause: to be replaced after its back-off, or down until a person does something."""
    attempts = status.attempts + 1
    record = _record(status, cause, attempts)
    decision = decide_restart(status.restarts, context.model.spec.restart, context.now)
    is_final = cause.failure_class is FailureClass.BAD_CONFIG or decision.at is None
    failed = enter(
        context,
        status,
        GroupPhase.FAILED if is_final else GroupPhase.TERMINATING,
        restarts=decision.recent,
        attempts=attempts,
        backoff_until=None if is_final else decision.at,
    )
    # Somebody else ends a group that works: its answers may finish, as in a drain.
    grace_seconds = None if cause.failure_class is FailureClass.EVICTED else FAILED_GROUP_GRACE_SECONDS
    events = [PlannedEvent("Warning", EventReason.GROUP_FAILED, failure_sentence(record))]
    if decision.at is None and cause.failure_class is not FailureClass.BAD_CONFIG:
        spent = f"group {status.index} stays down: {spent_sentence(len(decision.recent))}"
        events.append(PlannedEvent("Warning", EventReason.RESTART_BUDGET_SPENT, spent))
    deletions = delete_pods(pods, grace_seconds)
    return GroupStep(failed, failure=record, delete=deletions, events=tuple(events)).seen(context, pods)


def give_back(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], pod: ObservedPod) -> GroupStep:
    """Delete all pods of a group because `pod` finds no node or no image, or isn't started; it tries again later."""
    waiting = enter(
        context, status, GroupPhase.WAITING, attempts=status.attempts + 1, backoff_until=next_try(context, status)
    )
    record = _blocked_record(context, status, pod)
    reason = _EVENT_OF_CLASS[record.failure_class]
    message = f"{failure_sentence(record)}; the group gives its nodes back and tries again"
    event = PlannedEvent("Warning", reason, message)
    deletions = delete_pods(pods, FAILED_GROUP_GRACE_SECONDS)
    return GroupStep(waiting, failure=record, delete=deletions, events=(event,)).seen(context, pods)


def refusal(context: Context, status: GroupStatus, pod: ObservedPod) -> Refusal | Settling | None:
    """What goes on record, once for an incarnation, about an image or a volume that can't be had; kubelets try on."""
    assert pod.blocked is not None, pod
    blocked = pod.blocked
    if blocked.failure_class is FailureClass.UNSCHEDULABLE or _on_record(context, status) is not None:
        return None
    if blocked.failure_class is FailureClass.NOT_STARTED and blocked.since is not None:
        left = NOT_STARTED_SECONDS - (context.now - blocked.since).total_seconds()
        if left > 0:
            return Settling(min(left, NOT_STARTED_SECONDS))
    record = _blocked_record(context, status, pod)
    return Refusal(record, PlannedEvent("Warning", _EVENT_OF_CLASS[record.failure_class], failure_sentence(record)))


def name_lost_node(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> FailureRecord | None:
    """A better record for a group whose peers noticed first, once a node of its turns out to be lost."""
    recorded, lost = _on_record(context, status), next((pod for pod in pods if pod.lost), None)
    if recorded is None or lost is None or recorded.failure_class not in _EXPLAINED_BY_A_LOST_NODE:
        return None
    update = {
        "stage": lost.stage,
        "container": "",
        "reason": FailureClass.NODE_LOST,
        "failure_class": FailureClass.NODE_LOST,
        "exit_code": None,
        "message": f"node {lost.node} is lost; stage {recorded.stage} noticed: {recorded.message}",
    }
    return recorded.model_copy(update=update)


def failure_sentence(record: FailureRecord) -> str:
    """One failure as a sentence: where, what class, last words."""
    where = f"stage {record.stage}" + (f" ({record.container})" if record.container not in ("", "stage") else "")
    return f"{where} of group {record.group} failed: {record.failure_class}: {record.message}"


def spent_sentence(restarts: int) -> str:
    """Why a group is not restarted. A budget that is spent without a restart is one of none."""
    until = "not restarted again until the spec or the annotation stageline.dev/restart changes"
    match restarts:
        case 0:
            return "not restarted: spec.restart.maxRestarts is 0"
        case 1:
            return f"restarted once, {until}"
        case _:
            return f"restarted {restarts} times, {until}"


def _on_record(context: Context, status: GroupStatus) -> FailureRecord | None:
    """The failure of this very incarnation, when it has one."""
    this = (status.index, status.incarnation)
    failures = context.observed.status.last_failures
    return next((each for each in failures if (each.group, each.incarnation) == this), None)


def _record(status: GroupStatus, cause: Failure, attempts: int) -> FailureRecord:
    failure_class, message = cause.failure_class, cause.detail
    if failure_class in _CLASSLESS and attempts >= CRASH_LOOP_ATTEMPTS:
        failure_class = FailureClass.CRASH_LOOP
        message = f"ended {attempts} times in a row before it was ready; last: {message}"
    return FailureRecord(
        time=cause.end.finished_at,
        group=status.index,
        incarnation=status.incarnation,
        stage=cause.end.stage,
        container=cause.end.container,
        reason=cause.end.reason,
        failure_class=failure_class,
        exit_code=cause.end.exit_code,
        message=message,
    )


def _blocked_record(context: Context, status: GroupStatus, pod: ObservedPod) -> FailureRecord:
    blocked = pod.blocked
    return FailureRecord(
        time=context.now,
        group=status.index,
        incarnation=status.incarnation,
        stage=pod.stage,
        container=blocked.container if blocked else "",
        reason=blocked.reason if blocked else FailureClass.UNSCHEDULABLE,
        failure_class=blocked.failure_class if blocked else FailureClass.UNSCHEDULABLE,
        message=blocked.message if blocked else "no node was found for it, and no scheduler says why",
    )
