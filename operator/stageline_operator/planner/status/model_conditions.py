"""Conditions of a PipelineModel, from the phases of its groups.

Available: at least one group serves. Ready: the model matches its spec. Progressing: a change is under way within its
deadline. Degraded: a user must act, because a group stays down until the template changes. Stalled: waiting does not
help, because the model is Degraded or past its progress deadline; tools that wait for Ready stop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import FailureClass
from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.life.status import (
    Condition,
    FailureRecord,
    GroupStatus,
    PipelineModelStatus,
    StageObserved,
)
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.group.failure import failure_sentence, spent_sentence
from stageline_operator.planner.group.stage_rows import NotReady
from stageline_operator.planner.types import GroupPhase

_RESTARTING = (GroupPhase.TERMINATING, GroupPhase.BACKING_OFF)
_REASON_OF_ROW: Final[Mapping[str, Reason]] = {
    FailureClass.UNSCHEDULABLE: Reason.UNSCHEDULABLE,
    FailureClass.IMAGE_PULL: Reason.IMAGE_PULL,
    FailureClass.NOT_STARTED: Reason.NOT_STARTED,
    FailureClass.QUOTA_EXCEEDED: Reason.QUOTA_EXCEEDED,
    FailureClass.POD_REFUSED: Reason.POD_REFUSED,
    NotReady.NODE_UNREACHABLE: Reason.NODE_UNREACHABLE,
}


@dataclass(frozen=True)
class Judged:
    """Input of the conditions. `is_overdue`: no group became ready within the progress deadline."""

    groups: Sequence[GroupStatus]
    failures: Sequence[FailureRecord]
    model: PipelineModel
    revision: str
    is_overdue: bool = False
    refusal: str = ""
    """Why the API server refuses a wanted object."""
    advice: str = ""
    """Added to the message of a ready model."""

    @property
    def ready(self) -> list[GroupStatus]:
        return [group for group in self.groups if group.phase == GroupPhase.READY]

    @property
    def wanted(self) -> int:
        return 0 if self.model.spec.suspend else self.model.spec.replicas

    @property
    def is_complete(self) -> bool:
        """Whether all wanted groups are ready, none is left over, and at most `partition` are outdated."""
        outdated = sum(group.revision != self.revision for group in self.groups)
        return len(self.ready) == len(self.groups) == self.wanted and outdated <= self.model.spec.rollout.partition

    def last_failure(self, group: GroupStatus) -> FailureRecord | None:
        return next((failure for failure in self.failures if failure.group == group.index), None)


@dataclass(frozen=True)
class _Verdict:
    holds: bool
    reason: Reason
    message: str = ""


def model_conditions(judged: Judged, previous: Sequence[Condition], now: datetime) -> tuple[Condition, ...]:
    """All conditions; `last_transition_time` changes only with a condition's status."""
    counted = f"{len(judged.ready)} of {judged.wanted} groups are ready"
    available = bool(judged.ready)
    degraded, progressing = _degraded(judged), _progressing(judged)
    verdicts = {
        ConditionType.AVAILABLE: _Verdict(available, Reason.AS_EXPECTED if available else _why_nobody(judged), counted),
        ConditionType.PROGRESSING: progressing,
        ConditionType.DEGRADED: degraded,
        ConditionType.READY: _ready(judged, degraded, progressing, counted),
        ConditionType.STALLED: _stalled(degraded, progressing),
    }
    before = {condition.type: condition for condition in previous}
    generation = judged.model.metadata.generation
    return tuple(_condition(kind, each, before.get(kind), generation, now) for kind, each in verdicts.items())


def refused_status(
    before: PipelineModelStatus, manifest: Mapping[str, Any], problems: Sequence[FieldProblem], now: datetime
) -> PipelineModelStatus:
    """The cluster accepted a spec that this version can't run: conditions name the fields, and groups keep running.

    `before` has the current state of its groups.
    """
    generation = manifest["metadata"].get("generation")
    sentence = "; ".join(str(problem) for problem in problems)[:32_000]
    bad = _Verdict(True, Reason.BAD_CONFIGURATION, sentence)
    verdicts = dict.fromkeys((ConditionType.DEGRADED, ConditionType.STALLED), bad)
    verdicts |= dict.fromkeys((ConditionType.READY, ConditionType.PROGRESSING), replace(bad, holds=False))
    ready = sum(group.phase == GroupPhase.READY for group in before.groups)
    why = Reason.AS_EXPECTED if ready else Reason.GROUPS_NOT_READY
    counted = f"{ready} of {len(before.groups)} groups are ready"
    verdicts[ConditionType.AVAILABLE] = _Verdict(bool(ready), why, counted)
    known = {condition.type: condition for condition in before.conditions}
    judged: dict[str, Condition] = {
        kind: _condition(kind, each, known.get(kind), generation, now) for kind, each in verdicts.items()
    }
    return before.model_copy(
        update={"observed_generation": generation, "conditions": tuple({**known, **judged}.values())}
    )


def _ready(judged: Judged, degraded: _Verdict, progressing: _Verdict, counted: str) -> _Verdict:
    """Its reason is in `kubectl get`: one word for why the model is not ready."""
    if judged.model.spec.suspend:
        return _Verdict(False, Reason.SUSPENDED, counted)
    if judged.is_complete:
        if not judged.wanted:
            return _Verdict(True, Reason.SCALED_TO_ZERO, counted)
        return _Verdict(True, Reason.ALL_GROUPS_READY, f"{counted}; {judged.advice}" if judged.advice else counted)
    why = next((each for each in (degraded, progressing) if each.reason is not Reason.AS_EXPECTED), None)
    if why is None:
        return _Verdict(False, Reason.GROUPS_NOT_READY, counted)
    return _Verdict(False, why.reason, f"{counted}; {why.message}" if why.message else counted)


def _why_nobody(judged: Judged) -> Reason:
    return Reason.GROUPS_NOT_READY if judged.model.spec.replicas else Reason.SCALED_TO_ZERO


def _stalled(degraded: _Verdict, progressing: _Verdict) -> _Verdict:
    if degraded.holds:
        return degraded
    is_overdue = progressing.reason is Reason.PROGRESS_DEADLINE_EXCEEDED
    return (
        _Verdict(True, progressing.reason, progressing.message) if is_overdue else _Verdict(False, Reason.AS_EXPECTED)
    )


def _progressing(judged: Judged) -> _Verdict:
    if judged.model.spec.suspend:
        return _Verdict(bool(judged.groups), Reason.SUSPENDED, "spec.suspend is true")
    under_way = _under_way(judged)
    if under_way is not None and judged.is_overdue:
        seconds = judged.model.spec.rollout.progress_deadline_seconds
        message = f"no group became ready within rollout.progressDeadlineSeconds ({seconds} s)"
        waits = f"{message}; {under_way.message}" if under_way.message else message
        return _Verdict(False, Reason.PROGRESS_DEADLINE_EXCEEDED, waits)
    return under_way or _Verdict(False, Reason.AS_EXPECTED)


def _under_way(judged: Judged) -> _Verdict | None:
    """The worst change in progress; None if there is none."""
    if judged.refusal and not judged.is_complete:
        return _Verdict(True, Reason.WRITE_REFUSED, f"the API server refuses an object: {judged.refusal}")
    restarting = [group for group in judged.groups if group.phase in _RESTARTING]
    if restarting:
        failure = judged.last_failure(restarting[0])
        return _Verdict(True, Reason.BACKING_OFF, failure_sentence(failure) if failure else "")
    for group in judged.groups:
        blocked = next((row for row in group.stages if row.reason in _REASON_OF_ROW), None)
        if blocked is not None and group.phase in (GroupPhase.CREATING, GroupPhase.STARTING):
            return _Verdict(True, _REASON_OF_ROW[blocked.reason], _pending_sentence(group, blocked))
        if group.phase == GroupPhase.WAITING:
            failure = judged.last_failure(group)
            reason = _REASON_OF_ROW.get(failure.failure_class) if failure else None
            return _Verdict(True, reason or Reason.UNSCHEDULABLE, failure_sentence(failure) if failure else "")
    running = [group for group in judged.groups if group.phase not in (GroupPhase.READY, GroupPhase.FAILED)]
    if judged.groups and any(group.revision != judged.revision for group in judged.groups) and not judged.is_complete:
        updated = sum(group.revision == judged.revision for group in judged.groups)
        return _Verdict(True, Reason.ROLLING_OUT, f"{updated} of {judged.wanted} groups have the current revision")
    if not running and len(judged.groups) == judged.wanted:
        return None
    return _Verdict(True, Reason.GROUPS_STARTING, _preparing_sentence(running))


def _preparing_sentence(groups: Sequence[GroupStatus]) -> str:
    """What the first stage that has not begun does; empty if all have begun."""
    rows = ((group, row) for group in groups for row in group.stages if row.reason == NotReady.PREPARING)
    return next((f"stage {row.index} of group {group.index}: {row.message}" for group, row in rows), "")


def _pending_sentence(group: GroupStatus, row: StageObserved) -> str:
    if row.reason == NotReady.NODE_UNREACHABLE:
        return f"stage {row.index} of group {group.index}: {row.message}"
    since = f" since {row.since:%Y-%m-%dT%H:%M:%SZ}" if row.since is not None else ""
    return f"stage {row.index} of group {group.index} is pending{since}: {row.message}"


def _degraded(judged: Judged) -> _Verdict:
    down = [group for group in judged.groups if group.phase == GroupPhase.FAILED]
    if not down:
        return _Verdict(False, Reason.AS_EXPECTED)
    failure = judged.last_failure(down[0])
    if failure is None:
        return _Verdict(True, Reason.GROUP_FAILED, f"group {down[0].index} is down and its failure is not on record")
    if failure.failure_class is FailureClass.BAD_CONFIG:
        sentence = f"{failure_sentence(failure)}; correct the spec; it is not retried unchanged"
        return _Verdict(True, Reason.BAD_CONFIGURATION, sentence)
    sentence = f"{failure_sentence(failure)}; {spent_sentence(len(down[0].restarts))}"
    return _Verdict(True, Reason.RESTART_BUDGET_SPENT, sentence)


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
