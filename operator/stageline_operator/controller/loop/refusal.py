"""Status of a PipelineModel that the cluster accepted and this version can't run: said plainly, and nothing touched."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stageline_api.conditions import ConditionType, Reason
from stageline_api.resource.field_problem import FieldProblem
from stageline_api.resource.status import Condition, PipelineModelStatus


def refused_status(
    before: PipelineModelStatus, manifest: Mapping[str, Any], problems: Sequence[FieldProblem], now: datetime
) -> PipelineModelStatus:
    """The status before, with conditions that name the fields; groups keep running as they are."""
    generation = manifest["metadata"].get("generation")
    sentence = "; ".join(str(problem) for problem in problems)[:32_000]
    verdicts = {ConditionType.DEGRADED: "True", ConditionType.READY: "False", ConditionType.PROGRESSING: "False"}
    kept = {condition.type: condition for condition in before.conditions}
    for kind, status in verdicts.items():
        known = kept.get(kind)
        kept[kind] = Condition(
            type=kind,
            status="True" if status == "True" else "False",
            observed_generation=generation,
            last_transition_time=known.last_transition_time if known and known.status == status else now,
            reason=Reason.BAD_CONFIGURATION,
            message=sentence,
        )
    return before.model_copy(update={"observed_generation": generation, "conditions": tuple(kept.values())})
