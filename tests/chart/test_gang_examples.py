"""The examples for schedulers that place whole groups: what each of them reads on the pods that the operator makes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from processes.repository_files import ROOT
from stageline_api.manifests.manifest_loader import load_one_model
from stageline_operator.planner.objects import GroupIncarnation, build_stage_pod

EXAMPLES = ROOT / "examples"


def only_document(file: Path) -> dict[str, Any]:
    (document,) = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    return dict(document)


@pytest.mark.parametrize(
    ("example", "scheduler", "annotation"),
    [("volcano", "volcano", "scheduling.k8s.io/group-name"), ("kai", "kai-scheduler", "pod-group-name")],
)
def test_every_incarnation_joins_the_pod_group_that_stands_beside_the_model(
    example: str, scheduler: str, annotation: str
) -> None:
    group = only_document(EXAMPLES / "gang" / f"{example}_pod_group.yaml")
    pods = [pod_of(example, GroupIncarnation(0, 7), stage) for stage in (0, 1)]
    assert group["spec"]["minMember"] == len(pods)
    for pod in pods:
        assert pod["metadata"]["annotations"][annotation] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == scheduler


def test_groups_join_pod_groups_of_their_own() -> None:
    for example in ("volcano", "kai"):
        first, second = (pod_of(example, GroupIncarnation(group, 1), 0)["metadata"]["annotations"] for group in (0, 1))
        assert first != second, example


def test_kai_is_told_to_leave_the_grouping_to_us() -> None:
    """It reads the annotation on the pod itself or on its owners, and only the string `true`."""
    annotations = pod_of("kai", GroupIncarnation(0, 1), 1)["metadata"]["annotations"]
    assert annotations["kai.scheduler/skip-podgrouper"] == "true"


def pod_of(example: str, life: GroupIncarnation, stage: int) -> dict[str, Any]:
    model = load_one_model(EXAMPLES / "gang" / f"{example}.yaml")
    return build_stage_pod(model, life, stage, "abc", "image")
