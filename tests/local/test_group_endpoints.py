"""What a local gateway is told of a group: whether it takes requests, of which revision it is, whether it drains."""

from typing import Any

import pytest

from cluster.planned_cluster import tiny_model
from stageline_api import labels
from stageline_api.resource.life.status import GroupStatus, PipelineModelStatus
from stageline_local.session.endpoints_file import group_endpoints
from stageline_operator.planner.types import GroupPhase

POD: dict[str, Any] = {
    "metadata": {"labels": {labels.STAGE: "0", labels.GROUP: "0", labels.INCARNATION: "3"}},
    "status": {"podIP": "127.0.0.9"},
}


@pytest.mark.parametrize(
    ("phase", "session_drains", "ready", "draining"),
    [
        (GroupPhase.READY, False, True, False),
        (GroupPhase.READY, True, False, True),
        (GroupPhase.REPLACING, False, False, True),
        (GroupPhase.DRAINING, False, False, True),
        (GroupPhase.STARTING, False, False, False),
        (GroupPhase.TERMINATING, False, False, False),
    ],
)
def test_a_group_is_ready_or_drains_or_neither(
    phase: GroupPhase, session_drains: bool, ready: bool, draining: bool
) -> None:
    status = PipelineModelStatus(groups=(GroupStatus(index=0, incarnation=3, revision="abc", phase=phase),))
    [group] = group_endpoints(tiny_model(), status, [POD], session_drains).groups
    assert (group.ready, group.draining, group.revision) == (ready, draining, "abc")
    assert (group.url, group.incarnation) == ("http://127.0.0.9:8000", 3)
    assert bool(group.message) != ready


def test_a_models_resume_window_goes_with_its_groups() -> None:
    model = tiny_model(timeouts={"resumeWindowSeconds": 7})
    assert group_endpoints(model, PipelineModelStatus(), [], False).resume_window_seconds == {model.served_name: 7.0}


def test_a_group_without_a_pod_neither_answers_nor_drains() -> None:
    status = PipelineModelStatus(groups=(GroupStatus(index=0, incarnation=4, phase=GroupPhase.REPLACING),))
    [group] = group_endpoints(tiny_model(), status, [POD], False).groups
    assert (group.url, group.ready, group.draining) == ("", False, False)
