"""What the API server refuses is the reason on the model's status why it is not ready, until it is refused no more."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cluster.planned_cluster import SETTING
from stageline_api.conditions import ConditionType, Reason
from stageline_api.resource.life.status import Condition, PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import Observed

WORDS = "create pods tiny-0-1-0: 403 Forbidden exceeded quota: limits, must specify limits.memory for: engine,prepare"


def model(**spec: Any) -> PipelineModel:
    head = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel", "metadata": {"name": "tiny"}}
    return PipelineModel.model_validate({**head, "spec": {"model": {"source": "file:///models/tiny"}, **spec}})


def conditions(refusal: str, **spec: Any) -> dict[str, Condition]:
    observed = Observed(status=PipelineModelStatus(), refusal=refusal)
    status = plan(model(**spec), observed, datetime(2026, 1, 1, tzinfo=UTC), "token", SETTING).status
    return {each.type: each for each in status.conditions}


def test_a_refusal_is_the_reason_and_the_message() -> None:
    found = conditions(WORDS)
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        assert found[kind].reason == Reason.WRITE_REFUSED
        assert "must specify limits.memory for: engine,prepare" in found[kind].message
    assert found[ConditionType.READY].status == "False"


@pytest.mark.parametrize(
    ("refusal", "spec", "reason"),
    [("", {}, Reason.GROUPS_STARTING), (WORDS, {"suspend": True}, Reason.SUSPENDED)],
    ids=["nothing-refused", "nothing-wanted"],
)
def test_otherwise_it_is_what_it_was(refusal: str, spec: dict[str, Any], reason: Reason) -> None:
    assert conditions(refusal, **spec)[ConditionType.READY].reason == reason
