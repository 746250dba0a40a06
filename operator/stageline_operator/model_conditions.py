"""Conditions of a PipelineModel, from the phases of its groups.

Degraded means that a person must act: a group stays down until the spec changes. A group that is being replaced
shows in Progressing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import FailureClass
from stageline_api.spec_status import Condition, FailureRecord, GroupStatus
from stageline_operator.group_plan import failure_sentence
from stageline_operator.plan import GroupPhase


@dataclass(frozen=True)
class _Verdict:
    holds: bool
    reason: Reason
    message: str = ""


def model_conditions(
    groups: Sequence[GroupStatus],
    failures: Sequence[FailureRecord],
    wanted: int,
    revision: str,
    generation: int | None,
    previous: Sequence[Condition],
    now: datetime,
) -> tuple[Condition, ...]:
    """All four conditions; `last_transition_time` moves only when a condition's status does."""
    ready = sum(group.phase == GroupPhase.READY for group in groups)
    current = sum(group.phase == GroupPhase.READY and group.revision == revision for group in groups)
    counted = f"{ready} of {wanted} groups are ready"
    verdicts = {
        ConditionType.AVAILABLE: _Verdict(ready > 0, _reason(ready > 0, Reason.GROUPS_NOT_READY), counted),
        ConditionType.PROGRESSING: _progressing(groups, failures),
        ConditionType.DEGRADED: _degraded(groups, failures),
        ConditionType.READY: _Verdict(
            current == wanted == len(groups),
            Reason.ALL_GROUPS_READY if current == wanted else Reason.GROUPS_NOT_READY,
            counted,
        ),
    }
    before = {condition.type: condition for condition in previous}
    return tuple(_condition(kind, each, before.get(kind), generation, now) for kind, each in verdicts.items())


def _reason(holds: bool, otherwise: Reason) -> Reason:
    return Reason.AS_EXPECTED if holds else otherwise


def _last_failure(group: GroupStatus, failures: Sequence[FailureRecord]) -> FailureRecord | None:
    return next((failure for failure in failures if failure.group == group.index), None)


def _progressing(groups: Sequence[GroupStatus], failures: Sequence[FailureRecord]) -> _Verdict:
    restarting = [group for group in groups if group.phase in (GroupPhase.TERMINATING, GroupPhase.BACKING_OFF)]
    if restarting:
        failure = _last_failure(restarting[0], failures)
        return _Verdict(True, Reason.BACKING_OFF, failure_sentence(failure) if failure else "")
    moving = (GroupPhase.CREATING, GroupPhase.STARTING, GroupPhase.REPLACING)
    if not groups or any(group.phase in moving for group in groups):
        return _Verdict(True, Reason.GROUPS_STARTING)
    return _Verdict(False, Reason.AS_EXPECTED)


def _degraded(groups: Sequence[GroupStatus], failures: Sequence[FailureRecord]) -> _Verdict:
    down = [group for group in groups if group.phase == GroupPhase.FAILED]
    if not down:
        return _Verdict(False, Reason.AS_EXPECTED)
    failure = _last_failure(down[0], failures)
    if failure is None:
        return _Verdict(True, Reason.GROUP_FAILED, f"group {down[0].index} is down and its failure is not on record")
    if failure.failure_class is FailureClass.BAD_CONFIG:
        sentence = f"{failure_sentence(failure)}; correct the spec, it is not tried again as it is"
        return _Verdict(True, Reason.BAD_CONFIGURATION, sentence)
    return _Verdict(True, Reason.RESTART_BUDGET_SPENT, f"{failure_sentence(failure)}; {_spent(len(down[0].restarts))}")


def _spent(restarts: int) -> str:
    """Why a group is not restarted. A budget that is spent without a restart is one of none."""
    match restarts:
        case 0:
            return "not restarted: spec.restart.maxRestarts is 0"
        case 1:
            return "restarted once, not restarted again until the spec changes"
        case _:
            return f"restarted {restarts} times, not restarted again until the spec changes"


def _condition(
    kind: ConditionType, verdict: _Verdict, before: Condition | None, generation: int | None, now: datetime
) -> Condition:
    status = "True" if verdict.holds else "False"
    unchanged = before is not None and before.status == status
    return Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before is not None and unchanged else now,
        reason=verdict.reason,
        message=verdict.message,
    )
