"""What a group is waiting for, in one sentence: what somebody woken at night asks first. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from stageline_api import labels
from stageline_api.resource.status import FailureRecord, GroupStatus
from stageline_cli.on_call.facts.facts import EngineFacts, StageFacts
from stageline_operator.planner.types import GroupPhase

_NO_POD: Final = "NoPod"


def waits_for(
    group: GroupStatus,
    stages: Sequence[StageFacts],
    engine: EngineFacts | None,
    failure: FailureRecord | None,
    now: datetime,
) -> str:
    """Empty when the group serves. `failure` is its latest."""
    match group.phase:
        case GroupPhase.READY:
            return ""
        case GroupPhase.CREATING | GroupPhase.STARTING:
            return _slowest_start(stages)
        case GroupPhase.TERMINATING:
            return f"its pods to end{_after(failure)}"
        case GroupPhase.BACKING_OFF:
            return f"its next start{_at(group.backoff_until, now)}{_after(failure)}"
        case GroupPhase.WAITING:
            return f"nodes for all of its stages at once; tries again{_at(group.backoff_until, now)}"
        case GroupPhase.FAILED:
            return f"you: it stays down until the spec or the annotation {labels.RESTART} changes{_after(failure)}"
        case GroupPhase.REPLACING:
            return f"{_answers(engine)}, then starts anew with the changed template"
        case GroupPhase.DRAINING:
            return f"{_answers(engine)}, then is gone"
        case _:
            return ""


def _slowest_start(stages: Sequence[StageFacts]) -> str:
    late = [one for one in stages if not one.is_ready]
    if not late:
        return "the operator's next look: all stages are ready"
    # A stage without a pod has nothing to say that its neighbours' words don't explain.
    said = [one for one in late if one.message and one.phase != _NO_POD]
    first = (said or late)[0]
    loaded = "" if first.loaded_share is None else f" {first.loaded_share:.0%}"
    words = f": {first.message}" if first.message else ""
    others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return f"stage {first.stage}, {first.phase}{loaded}{words}{others}"


def _at(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return ""
    seconds = (moment - now).total_seconds()
    return f" in {seconds:.0f} s" if seconds >= 1 else " now"


def _after(failure: FailureRecord | None) -> str:
    if failure is None:
        return ""
    stage = "" if failure.stage is None else f" of stage {failure.stage}"
    return f" (after {failure.failure_class}{stage})"


def _answers(engine: EngineFacts | None) -> str:
    if engine is None:
        return "its pods to end"
    return f"{engine.requests_running + engine.requests_waiting} answers in progress"
