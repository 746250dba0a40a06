"""One group's next step: a ladder of states, one rung per pass.

    Creating -> Starting <-> Ready -> (a container ends) -> Terminating -> BackingOff -> Creating, incarnation + 1
                                   -> (budget spent or bad configuration) -> Failed -> (spec changes) -> Replacing
                                   -> (template changes) -> Replacing -> Creating, incarnation + 1

Invariants: no pod of an incarnation is made while a pod of another one exists; an incarnation is on record before its
pods are made; incarnations only rise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from stageline_api.conditions import Reason
from stageline_api.failures import FailureClass
from stageline_api.spec_status import FailureRecord, GroupStatus
from stageline_operator.cause import Failure, Settling, find_cause
from stageline_operator.objects import GroupIncarnation, build_stage_pod
from stageline_operator.objects.identity import pod_name
from stageline_operator.observed_pod import ContainerEnd, ObservedPod
from stageline_operator.plan import Context, Deletion, GroupPhase, PlannedEvent
from stageline_operator.restart_policy import decide_restart, recent_restarts
from stageline_operator.stage_rows import stage_rows

FAILED_GROUP_GRACE_SECONDS: Final = 3.0
"""A failed group has lost its answers already; a short grace only lets processes say their last words."""


@dataclass(frozen=True)
class GroupStep:
    """What one pass does about one group. `status` None: the group is gone."""

    status: GroupStatus | None
    apply: tuple[dict[str, Any], ...] = ()
    delete: tuple[Deletion, ...] = ()
    failure: FailureRecord | None = None
    requeue_after_seconds: float | None = None
    events: tuple[PlannedEvent, ...] = ()


def plan_group(
    context: Context, index: int, status: GroupStatus | None, pods: Sequence[ObservedPod], may_be_replaced: bool = True
) -> GroupStep:
    """Next step of group `index`; `pods` are all pods of the group, of any incarnation.

    `may_be_replaced` says whether an outdated group may be drained now, or must wait its turn.
    """
    if status is None:
        # Pods without a record are of a life that nobody remembers: the next one starts above them.
        highest = max((pod.incarnation for pod in pods), default=0)
        return _begin(context, GroupStatus(index=index, incarnation=highest))
    strays = [pod for pod in pods if pod.incarnation != status.incarnation]
    if strays:
        return GroupStep(_with_rows(context, status, pods), delete=_delete(strays, grace_seconds=0.0))
    match phase_of(status):
        case GroupPhase.CREATING | GroupPhase.STARTING | GroupPhase.READY:
            if status.revision != context.revision and may_be_replaced:
                return GroupStep(_phase(status, GroupPhase.REPLACING), requeue_after_seconds=0.0)
            return _run(context, status, pods)
        case GroupPhase.REPLACING:
            return _after_pods_are_gone(context, status, pods, grace_seconds=None)
        case GroupPhase.TERMINATING:
            return _terminate(context, status, pods)
        case GroupPhase.BACKING_OFF:
            return _back_off(context, status, pods)
        case GroupPhase.FAILED:
            return _stay_failed(context, status, pods)


def phase_of(status: GroupStatus) -> GroupPhase:
    """The phase on record; one that this version does not know is judged anew from the pods."""
    try:
        return GroupPhase(status.phase)
    except ValueError:
        return GroupPhase.STARTING


def remove_group(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    """Next step of a group that is not wanted any more."""
    if not pods:
        return GroupStep(None)
    ending = _with_rows(context, _phase(status, GroupPhase.REPLACING), pods)
    return GroupStep(ending, delete=_delete(pods, grace_seconds=None))


def _run(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    cause = find_cause([end for pod in pods for end in pod.ends] + _vanished(context, status, pods), context.now)
    if isinstance(cause, Settling):
        return GroupStep(_with_rows(context, status, pods), requeue_after_seconds=cause.seconds)
    if cause is not None:
        return _fail(context, status, pods, cause)
    missing = _missing_stages(context, pods)
    if missing:
        life = GroupIncarnation(status.index, status.incarnation)
        image = context.setting.default_image
        made = tuple(build_stage_pod(context.model, life, stage, context.revision, image) for stage in missing)
        return GroupStep(_with_rows(context, status, pods), apply=made)
    phase = GroupPhase.READY if all(pod.ready for pod in pods) else GroupPhase.STARTING
    events: tuple[PlannedEvent, ...] = ()
    if phase is GroupPhase.READY and status.phase != GroupPhase.READY:
        message = f"group {status.index} (incarnation {status.incarnation}) is ready"
        events = (PlannedEvent("Normal", "GroupReady", message),)
    return GroupStep(_with_rows(context, _phase(status, phase), pods), events=events)


def _missing_stages(context: Context, pods: Sequence[ObservedPod]) -> list[int]:
    present = {pod.stage for pod in pods}
    return [stage for stage in range(context.model.spec.parallelism.pipeline) if stage not in present]


def _vanished(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> list[ContainerEnd]:
    """Pods that were there and are not, or are being deleted by someone else."""
    leaving = {pod.stage: pod.name for pod in pods if pod.deleting}
    if status.phase != GroupPhase.CREATING:
        life = GroupIncarnation(status.index, status.incarnation)
        leaving |= {stage: pod_name(context.model, life, stage) for stage in _missing_stages(context, pods)}
    return [
        ContainerEnd(stage, "", None, 0, FailureClass.NODE_LOST, f"pod {name} was deleted or lost", context.now)
        for stage, name in leaving.items()
    ]


def _fail(context: Context, status: GroupStatus, pods: Sequence[ObservedPod], cause: Failure) -> GroupStep:
    record = FailureRecord(
        time=cause.end.finished_at,
        group=status.index,
        incarnation=status.incarnation,
        stage=cause.end.stage,
        container=cause.end.container,
        reason=cause.end.reason,
        failure_class=cause.failure_class,
        exit_code=cause.end.exit_code,
        message=cause.detail,
    )
    decision = decide_restart(status.restarts, context.model.spec.restart, context.now)
    is_final = cause.failure_class is FailureClass.BAD_CONFIG or decision.at is None
    failed = status.model_copy(
        update={
            "phase": GroupPhase.FAILED if is_final else GroupPhase.TERMINATING,
            "restarts": decision.recent,
            "backoff_until": None if is_final else decision.at,
        }
    )
    event = PlannedEvent("Warning", Reason.GROUP_FAILED, failure_sentence(record))
    return GroupStep(_with_rows(context, failed, pods), failure=record, delete=_delete_failed(pods), events=(event,))


def failure_sentence(record: FailureRecord) -> str:
    """One failure as a sentence: where, what class, last words."""
    where = f"stage {record.stage}" + (f" ({record.container})" if record.container not in ("", "stage") else "")
    return f"{where} of group {record.group} failed: {record.failure_class}: {record.message}"


def _terminate(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if pods:
        return GroupStep(_with_rows(context, status, pods), delete=_delete_failed(pods))
    return GroupStep(_with_rows(context, _phase(status, GroupPhase.BACKING_OFF), pods), requeue_after_seconds=0.0)


def _back_off(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if pods:
        return GroupStep(_with_rows(context, status, pods), delete=_delete_failed(pods))
    if status.backoff_until is not None and context.now < status.backoff_until and not context.spec_changed:
        wait_seconds = (status.backoff_until - context.now).total_seconds()
        return GroupStep(_with_rows(context, status, pods), requeue_after_seconds=wait_seconds)
    restarts = (*recent_restarts(status.restarts, context.model.spec.restart, context.now), context.now)
    return _begin(context, status.model_copy(update={"restarts": restarts}))


def _stay_failed(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStep:
    if context.spec_changed or status.revision != context.revision:
        fresh = status.model_copy(update={"restarts": (), "phase": GroupPhase.REPLACING})
        return GroupStep(fresh, requeue_after_seconds=0.0)
    return GroupStep(_with_rows(context, status, pods), delete=_delete_failed(pods))


def _after_pods_are_gone(
    context: Context, status: GroupStatus, pods: Sequence[ObservedPod], grace_seconds: float | None
) -> GroupStep:
    if pods:
        return GroupStep(_with_rows(context, status, pods), delete=_delete(pods, grace_seconds))
    return _begin(context, status)


def _begin(context: Context, status: GroupStatus) -> GroupStep:
    """Put the next incarnation on record; its pods are made in the next pass."""
    update = {
        "incarnation": status.incarnation + 1,
        "revision": context.revision,
        "phase": GroupPhase.CREATING,
        "backoff_until": None,
    }
    return GroupStep(_with_rows(context, status.model_copy(update=update), ()), requeue_after_seconds=0.0)


def _with_rows(context: Context, status: GroupStatus, pods: Sequence[ObservedPod]) -> GroupStatus:
    return status.model_copy(update={"stages": stage_rows(context, status, pods)})


def _phase(status: GroupStatus, phase: GroupPhase) -> GroupStatus:
    return status.model_copy(update={"phase": phase})


def _delete_failed(pods: Sequence[ObservedPod]) -> tuple[Deletion, ...]:
    return _delete(pods, FAILED_GROUP_GRACE_SECONDS)


def _delete(pods: Sequence[ObservedPod], grace_seconds: float | None) -> tuple[Deletion, ...]:
    return tuple(Deletion("Pod", pod.name, grace_seconds) for pod in pods if not pod.deleting)
