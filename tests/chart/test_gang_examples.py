"""The examples for schedulers that place whole groups: what each of them reads of what the operator makes."""

import pytest

from processes.repository_files import ROOT
from stageline_api.manifests.manifest_loader import load_one_model
from stageline_operator.planner.objects import GroupIncarnation, build_pod_group, build_stage_pod

EXAMPLES = ROOT / "examples" / "gang"


@pytest.mark.parametrize(
    ("example", "scheduler", "annotation", "queue"),
    [
        ("volcano", "volcano", "scheduling.k8s.io/group-name", "default"),
        ("kai", "kai-scheduler", "pod-group-name", "default-queue"),
    ],
)
def test_the_pods_of_an_incarnation_join_a_pod_group_that_waits_for_all_of_them(
    example: str, scheduler: str, annotation: str, queue: str
) -> None:
    model, life = load_one_model(EXAMPLES / f"{example}.yaml"), GroupIncarnation(0, 7)
    group = build_pod_group(model, life)
    assert group is not None
    pods = [build_stage_pod(model, life, stage, "abc", "image") for stage in (0, 1)]
    assert group["spec"] == {"minMember": len(pods), "queue": queue}
    for pod in pods:
        assert pod["metadata"]["annotations"][annotation] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == scheduler


def test_kubernetes_own_scheduler_is_told_of_all_pods_by_their_own_spec() -> None:
    model, life = load_one_model(EXAMPLES / "kubernetes.yaml"), GroupIncarnation(0, 7)
    group = build_pod_group(model, life)
    assert group is not None
    assert group["apiVersion"] == "scheduling.k8s.io/v1beta1"
    for stage in (0, 1):
        spec = build_stage_pod(model, life, stage, "abc", "image")["spec"]
        assert spec["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}
        assert "schedulerName" not in spec


def test_a_whole_group_waits_in_kueues_queue() -> None:
    model = load_one_model(EXAMPLES.parent / "kueue.yaml")
    pods = [build_stage_pod(model, GroupIncarnation(1, 3), stage, "abc", "image") for stage in range(4)]
    for pod in pods:
        own = pod["metadata"]
        assert own["labels"]["kueue.x-k8s.io/queue-name"] == "models"
        assert own["labels"]["kueue.x-k8s.io/pod-group-name"] == "queued-1-3"
        assert own["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == str(len(pods))
