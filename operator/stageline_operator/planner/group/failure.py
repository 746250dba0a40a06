"""How a group ends: ends that no container reports, the record of the cause, and the restart decision. Pure.

`cause` finds the root cause. This module turns it into the incarnation's one record in the status, which outlives the
pods. `ladder` acts on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import ValidationError

from stageline_api.conditions import EventReason
from stageline_api.failures import CONSEQUENCES, FailureClass, place_of
from stageline_api.resource.life.policy import LONGEST_BACKOFF_SECONDS, RestartSpec
from stageline_api.resource.life.status import FailureRecord, GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.group.cause import Failure, Settling
from stageline_operator.planner.group.obstacle import Obstacle, missing_stages
from stageline_operator.planner.objects import GroupIncarnation
from stageline_operator.planner.objects.identity import pod_name
from stageline_operator.planner.observed.container_end import ContainerEnd
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase, PlannedEvent

CRASH_LOOP_ATTEMPTS: Final = 3
"""Consecutive incarnations that ended before they were ready, after which an unclassified end counts as a crash loop.
"""
NOT_STARTED_SECONDS: Final = 10.0
"""How long a pod may wait for an image or a volume before the wait is recorded: it may only be slow."""
_CLASSLESS: Final = frozenset({FailureClass.INTERNAL, FailureClass.KILLED})
_EXPLAINED_BY_A_LOST_NODE: Final = CONSEQUENCES | {FailureClass.STEP_TIMEOUT}

_EVENT_OF_CLASS: Final = {
    FailureClass.UNSCHEDULABLE: EventReason.GROUP_UNSCHEDULABLE,
    FailureClass.IMAGE_PULL: EventReason.IMAGE_PULL,
    FailureClass.NOT_STARTED: EventReason.NOT_STARTED,
    FailureClass.QUOTA_EXCEEDED: EventReason.QUOTA_EXCEEDED,
    FailureClass.POD_REFUSED: EventReason.POD_REFUSED,
}


@dataclass(frozen=True)
class RestartDecision:
    """`at` is when the next incarnation may start; None when the budget is spent."""

    recent: tuple[datetime, ...]
    at: datetime | None


def unreported_ends(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[ContainerEnd]:
    """An end for each stage that no container reports: its node is lost, or its pod is gone or being deleted."""
    ends = [_end(context, pod.stage, FailureClass.NODE_LOST, f"node {pod.node} is lost") for pod in pods if pod.lost]
    for pod in pods:
        if pod.deleting and not pod.lost:
            why = f"pod {pod.name} is being deleted" + (f": {pod.disruption}" if pod.disruption else "")
            ends.append(_end(context, pod.stage, FailureClass.EVICTED, why))
    if status.phase != GroupPhase.CREATING:
        life = GroupIncarnation(status.index, status.incarnation)
        for stage in missing_stages(context, status, pods):
            why = f"pod {pod_name(context.model, life, stage)} was deleted or lost"
            ends.append(_end(context, stage, FailureClass.NODE_LOST, why))
    return ends


def _end(context: Context, stage: int, reason: FailureClass, message: str) -> ContainerEnd:
    return ContainerEnd(stage, "", None, 0, reason, message, context.now)


def restart_policy(spec: Mapping[str, Any]) -> RestartSpec:
    """The restart policy in a manifest's spec; the default if this version can't read it."""
    try:
        return RestartSpec.read_accepted(spec.get("restart") or {})
    except ValidationError:
        return RestartSpec()


def recent_restarts(restarts: Sequence[datetime], policy: RestartSpec, now: datetime) -> tuple[datetime, ...]:
    """Restarts within the window of the budget."""
    window = timedelta(seconds=policy.window_seconds)
    return tuple(moment for moment in restarts if now - moment < window)


def decide_restart(status: GroupStatus, policy: RestartSpec, now: datetime) -> RestartDecision:
    """After r restarts in the window: none is left if r reaches `max_restarts`, else wait min(60, backoff * 2^r) s."""
    recent = recent_restarts(status.restarts, policy, now)
    if len(recent) >= policy.max_restarts:
        return RestartDecision(recent, None)
    doublings = min(len(recent), LONGEST_BACKOFF_SECONDS.bit_length())
    seconds = min(LONGEST_BACKOFF_SECONDS, policy.backoff_seconds * 2**doublings)
    return RestartDecision(recent, now + timedelta(seconds=seconds))


def decide_after_eviction(status: GroupStatus, policy: RestartSpec, now: datetime) -> RestartDecision:
    """An eviction is no failure of the group, so it uses no restart. Consecutive evictions back off longer."""
    doublings = min(status.attempts, LONGEST_BACKOFF_SECONDS.bit_length())
    seconds = min(LONGEST_BACKOFF_SECONDS, policy.backoff_seconds * 2**doublings)
    return RestartDecision(recent_restarts(status.restarts, policy, now), now + timedelta(seconds=seconds))


def is_eviction(cause: Failure, pods: Sequence[ObservedPod]) -> bool:
    """Whether the group was ended from outside: a drain, a preemption, a reclaimed node, a manual deletion.

    A pod that its kubelet evicts for its own disk use (an `emptyDir` over its limit) has no DisruptionTarget condition
    and no deletion timestamp.
    """
    disrupted = any(pod.disruption or pod.deleting for pod in pods if pod.stage == cause.end.stage)
    return cause.failure_class is FailureClass.EVICTED and (cause.end.reason != "Evicted" or disrupted)


def cause_record(status: GroupStatus, cause: Failure, attempts: int) -> FailureRecord:
    """The failure record of an incarnation that a container's end has ended."""
    failure_class, message = cause.failure_class, cause.detail
    if failure_class in _CLASSLESS and attempts >= CRASH_LOOP_ATTEMPTS:
        failure_class = FailureClass.CRASH_LOOP
        message = f"ended {attempts} times in a row before it was ready; last: {message}"
    return FailureRecord(
        time=cause.end.finished_at,
        group=status.index,
        incarnation=status.incarnation,
        stage=cause.end.stage,
        rank=cause.rank,
        container=cause.end.container,
        reason=cause.end.reason,
        failure_class=failure_class,
        exit_code=cause.end.exit_code,
        message=message,
    )


def blocked_record(context: Context, status: GroupStatus, obstacle: Obstacle) -> FailureRecord:
    """The failure record of an incarnation that can't start: one of its stages gets no pod, node, image or volume."""
    blocked = obstacle.blocked
    return FailureRecord(
        time=context.now,
        group=status.index,
        incarnation=status.incarnation,
        stage=obstacle.stage,
        container=blocked.container if blocked else "",
        reason=blocked.reason if blocked else FailureClass.UNSCHEDULABLE,
        failure_class=blocked.failure_class if blocked else FailureClass.UNSCHEDULABLE,
        message=blocked.message if blocked else "no node was found for it, and the scheduler reports no reason",
    )


def first_blocked_record(context: Context, status: GroupStatus, obstacle: Obstacle) -> FailureRecord | Settling | None:
    """The record, once per incarnation, of a missing image, volume or pod while the group keeps trying.

    None if there is nothing to record. A missing node is not recorded here: `gang` limits that wait.
    """
    blocked = obstacle.blocked
    if (
        blocked is None
        or blocked.failure_class is FailureClass.UNSCHEDULABLE
        or _on_record(context, status) is not None
    ):
        return None
    if blocked.failure_class is FailureClass.NOT_STARTED and blocked.since is not None:
        left = NOT_STARTED_SECONDS - (context.now - blocked.since).total_seconds()
        if left > 0:
            return Settling(min(left, NOT_STARTED_SECONDS))
    return blocked_record(context, status, obstacle)


def blocked_event(record: FailureRecord, consequence: str = "") -> PlannedEvent:
    """The event of a `blocked_record`, with its consequence."""
    message = failure_sentence(record) + (f"; {consequence}" if consequence else "")
    return PlannedEvent("Warning", _EVENT_OF_CLASS[record.failure_class], message)


def name_lost_node(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> FailureRecord | None:
    """A better record for a group whose peers failed first, once one of its nodes turns out to be lost."""
    recorded, lost = _on_record(context, status), next((pod for pod in pods if pod.lost), None)
    if recorded is None or lost is None or recorded.failure_class not in _EXPLAINED_BY_A_LOST_NODE:
        return None
    update = {
        "stage": lost.stage,
        "rank": None,
        "container": "",
        "reason": FailureClass.NODE_LOST,
        "failure_class": FailureClass.NODE_LOST,
        "exit_code": None,
        "message": f"node {lost.node} is lost; {place_of(recorded.stage, recorded.rank)} noticed: {recorded.message}",
    }
    return recorded.model_copy(update=update)


def _on_record(context: Context, status: GroupStatus) -> FailureRecord | None:
    this = (status.index, status.incarnation)
    failures = context.observed.status.last_failures
    return next((each for each in failures if (each.group, each.incarnation) == this), None)


def failure_sentence(record: FailureRecord) -> str:
    where = place_of(record.stage, record.rank) + (
        f" ({record.container})" if record.container not in ("", "stage") else ""
    )
    return f"{where} of group {record.group} failed: {record.failure_class}: {record.message}"


def spent_sentence(restarts: int) -> str:
    """Why the group is not restarted."""
    until = "not restarted again until the template or the annotation stageline.dev/restart changes"
    match restarts:
        case 0:
            return "not restarted: spec.restart.maxRestarts is 0"
        case 1:
            return f"restarted once, {until}"
        case _:
            return f"restarted {restarts} times, {until}"
