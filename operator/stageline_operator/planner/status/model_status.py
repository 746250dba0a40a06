"""The status of a PipelineModel: counts, conditions, progress deadline, and Events."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from stageline_api import labels
from stageline_api.conditions import ConditionType, EventReason, Reason
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.status.advice import give_advice
from stageline_operator.planner.status.model_conditions import Judged, model_conditions
from stageline_operator.planner.types import GroupPhase, PlannedEvent

KEPT_FAILURES: Final = 5
_COMING_BACK: Final = (
    GroupPhase.CREATING,
    GroupPhase.STARTING,
    GroupPhase.TERMINATING,
    GroupPhase.BACKING_OFF,
    GroupPhase.REPLACING,
)


def next_status(
    context: Context, groups: tuple[GroupStatus, ...], failures: tuple[FailureRecord, ...], retired_incarnation: int
) -> PipelineModelStatus:
    """The status to write before other writes."""
    model, before = context.model, context.observed.status
    advice = give_advice(model, context.setting.pod_host.gpu_resource)
    judged = Judged(groups, failures, model, context.revision, refusal=context.observed.refusal, advice=advice)
    progressed_at = context.now if _has_progressed(context, judged) else before.progressed_at or context.now
    deadline = timedelta(seconds=model.spec.rollout.progress_deadline_seconds)
    judged = replace(judged, is_overdue=context.now - progressed_at >= deadline)
    return PipelineModelStatus(
        observed_generation=model.metadata.generation,
        replicas=len(groups),
        ready_replicas=sum(group.phase == GroupPhase.READY for group in groups),
        updated_replicas=sum(group.revision == context.revision for group in groups),
        update_revision=context.revision,
        selector=f"{labels.MODEL}={model.name},{labels.STAGE}=0",
        url=context.setting.gateway_urls.get(model.namespace, ""),
        operator=before.operator,
        retired_incarnation=retired_incarnation,
        restart_request=context.restart_request,
        progressed_at=progressed_at,
        conditions=model_conditions(judged, before.conditions, context.now),
        groups=groups,
        last_failures=failures,
    )


def progress_deadline(context: Context, status: PipelineModelStatus) -> float | None:
    """Seconds until the progress deadline; None if nothing is under way or the deadline has passed."""
    if _holds(status, ConditionType.READY) or status.progressed_at is None or context.model.spec.suspend:
        return None
    deadline = timedelta(seconds=context.model.spec.rollout.progress_deadline_seconds)
    left = (status.progressed_at + deadline - context.now).total_seconds()
    return left if left > 0 else None


def model_events(context: Context, status: PipelineModelStatus) -> tuple[PlannedEvent, ...]:
    """Events about the model that become true in this pass."""
    before, events = context.observed.status, []
    if context.restart_requested:
        message = f"annotation {labels.RESTART} is {context.restart_request!r}: failed groups are retried"
        events.append(PlannedEvent("Normal", EventReason.RESTART_REQUESTED, message))
    now, then = _reason(status, ConditionType.PROGRESSING), _reason(before, ConditionType.PROGRESSING)
    if now == Reason.PROGRESS_DEADLINE_EXCEEDED != then:
        condition = next(each for each in status.conditions if each.type == ConditionType.PROGRESSING)
        events.append(PlannedEvent("Warning", EventReason.PROGRESS_DEADLINE_EXCEEDED, condition.message))
    if now == Reason.NODE_UNREACHABLE != then:
        condition = next(each for each in status.conditions if each.type == ConditionType.PROGRESSING)
        events.append(PlannedEvent("Warning", EventReason.NODES_UNREACHABLE, condition.message))
    if now == Reason.SUSPENDED != then:
        events.append(PlannedEvent("Normal", EventReason.SUSPENDED, "spec.suspend is true: all groups are removed"))
    if then == Reason.SUSPENDED != now:
        events.append(PlannedEvent("Normal", EventReason.RESUMED, "spec.suspend is false: groups are created again"))
    return tuple(events)


def _has_progressed(context: Context, judged: Judged) -> bool:
    """Whether the progress deadline restarts.

    It restarts at a new revision, one more ready group, a restart request, the end of a suspension, or the end of being
    Ready. Other spec changes don't restart it: an oscillating autoscaler would postpone the deadline forever.
    """
    before = context.observed.status
    was_ready = {group.index for group in before.groups if group.phase == GroupPhase.READY}
    is_ready = {group.index for group in judged.ready}
    return (
        before.update_revision not in ("", context.revision)
        or bool(is_ready - was_ready)
        or context.restart_requested
        or (_reason(before, ConditionType.PROGRESSING) == Reason.SUSPENDED and not context.model.spec.suspend)
        or (_holds(before, ConditionType.READY) and not judged.is_complete)
    )


def _holds(status: PipelineModelStatus, kind: ConditionType) -> bool:
    return any(each.type == kind and each.status == "True" for each in status.conditions)


def _reason(status: PipelineModelStatus, kind: ConditionType) -> str:
    return next((each.reason for each in status.conditions if each.type == kind), "")


def kept_pods(status: PipelineModelStatus, pods: Sequence[ObservedPod], wanted_groups: int) -> int:
    """How many ready pods an eviction must leave; `status` is about to be written.

    At most one group may be lost at a time, since each eviction costs a whole group. A budget counts pods and can't
    tell groups apart, so it keeps all ready pods but one. While a lost group restarts, no eviction is allowed. A group
    that stays down, finds no capacity or is overdue must not block a node drain.
    """
    ready = sum(pod.ready and not pod.deleting for pod in pods)
    progressing = next((each for each in status.conditions if each.type == ConditionType.PROGRESSING), None)
    is_overdue = progressing is not None and progressing.reason == Reason.PROGRESS_DEADLINE_EXCEEDED
    comes_back = any(group.phase in _COMING_BACK for group in status.groups) and not is_overdue
    may_go = 0 if comes_back and status.ready_replicas < wanted_groups else 1
    return max(0, ready - may_go)
