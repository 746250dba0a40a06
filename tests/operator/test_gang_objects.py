"""A scheduler that places whole groups: what each incarnation's pods join, and that it is there before they are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api import labels
from stageline_local.session.local_overrides import without_gang

VOLCANO = "PodGroup.scheduling.volcano.sh"
KAI = "PodGroup.scheduling.run.ai"
ANNOTATION = {VOLCANO: "scheduling.k8s.io/group-name", KAI: "pod-group-name"}
EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["step", "ready", "kill", "suspend", "volcano", "kai", "kueue", "kubernetes", "by hand"]),
        st.integers(0, 3),
    ),
    max_size=30,
)


def model_with(gang: str | None, generation: int = 1, **spec: Any) -> Any:
    queue = {} if gang == "kubernetes" else {"queue": "team"}
    placement = {} if gang is None else {"gang": {"scheduler": gang, **queue}}
    return tiny_model(generation, placement=placement, **spec)


def pod_groups(cluster: PlannedCluster) -> dict[tuple[str, str], dict[str, Any]]:
    return {key: each for key, each in cluster.objects.items() if key[0].startswith("PodGroup")}


@pytest.mark.parametrize(
    ("gang", "api_version", "scheduler"),
    [("volcano", "scheduling.volcano.sh/v1beta1", "volcano"), ("kai", "scheduling.run.ai/v2alpha2", "kai-scheduler")],
)
def test_each_incarnation_has_a_pod_group_of_as_many_members_as_stages(
    gang: str, api_version: str, scheduler: str
) -> None:
    cluster = PlannedCluster(model_with(gang, replicas=2, template={"priorityClassName": "high"}))
    cluster.settle()
    found = pod_groups(cluster)
    assert sorted(name for _, name in found) == ["tiny-0-1", "tiny-1-1"]
    for each in found.values():
        assert each["apiVersion"] == api_version
        assert each["spec"] == {"minMember": 2, "queue": "team", "priorityClassName": "high"}
    for pod in cluster.pods.values():
        assert pod["spec"]["schedulerName"] == scheduler


def test_kubernetes_own_pod_group_is_preempted_as_a_whole_and_its_pods_name_it() -> None:
    cluster = PlannedCluster(model_with("kubernetes", template={"priorityClassName": "high", "schedulerName": "mine"}))
    cluster.settle()
    ((key, found),) = pod_groups(cluster).items()
    assert key == ("PodGroup.scheduling.k8s.io", "tiny-0-1")
    assert (found["apiVersion"], found["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert found["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "disruptionMode": {"all": {}},
        "priorityClassName": "high",
    }
    assert found["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert len(cluster.pods) == 2
    for pod in cluster.pods.values():
        assert pod["spec"]["schedulingGroup"] == {"podGroupName": "tiny-0-1"}
        assert pod["spec"]["schedulerName"] == "mine"


def test_one_that_somebody_deleted_is_there_again_after_the_next_pass() -> None:
    cluster = PlannedCluster(model_with("volcano"))
    cluster.settle()
    (key,) = pod_groups(cluster)
    del cluster.objects[key]
    pods = dict(cluster.pods)
    cluster.step()
    assert list(pod_groups(cluster)) == [key]
    assert cluster.pods == pods


def test_kai_is_told_to_leave_the_grouping_to_us() -> None:
    cluster = PlannedCluster(model_with("kai"))
    cluster.settle()
    for pod in cluster.pods.values():
        assert pod["metadata"]["annotations"]["kai.scheduler/skip-podgrouper"] == "true"


def test_volcano_chooses_the_queue_that_nobody_names() -> None:
    cluster = PlannedCluster(tiny_model(placement={"gang": {"scheduler": "volcano"}}))
    cluster.settle()
    ((_, found),) = pod_groups(cluster).items()
    assert found["spec"] == {"minMember": 2}


def test_kueue_counts_pods_by_their_labels_and_any_scheduler_places_them() -> None:
    cluster = PlannedCluster(model_with("kueue", template={"schedulerName": "mine", "labels": {"team": "a"}}))
    cluster.settle()
    assert pod_groups(cluster) == {}
    for pod in cluster.pods.values():
        own = pod["metadata"]["labels"]
        assert own["kueue.x-k8s.io/queue-name"] == "team"
        assert own["kueue.x-k8s.io/pod-group-name"] == "tiny-0-1"
        assert own["team"] == "a"
        assert pod["metadata"]["annotations"] == {"kueue.x-k8s.io/pod-group-total-count": "2"}
        assert pod["spec"]["schedulerName"] == "mine"


def test_pods_that_kueue_holds_back_wait_for_as_long_as_it_takes_and_are_no_failure() -> None:
    cluster = PlannedCluster(model_with("kueue"))
    cluster.settle()
    for pod in cluster.pods.values():
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
        pod["spec"].pop("nodeName", None)
        pod["status"] = {"phase": "Pending", "conditions": [gated]}
    names = sorted(cluster.pods)
    for _ in range(20):
        cluster.advance(600)
        cluster.settle()
    (group,) = cluster.status.groups
    assert sorted(cluster.pods) == names, cluster.status
    assert (group.phase, group.restarts) == ("Starting", ()), cluster.status
    assert {(row.reason, row.message) for row in group.stages} == {("Unschedulable", "gated")}, group


def act(cluster: PlannedCluster, event: str | int) -> None:
    spec, generation = cluster.model.spec, (cluster.model.metadata.generation or 0) + 1
    gang = None if spec.placement.gang is None else spec.placement.gang.scheduler
    match event:
        case "ready":
            cluster.make_ready()
        case "kill" if cluster.pods:
            name = min(cluster.pods)
            del cluster.objects["Pod", name]
        case "suspend":
            cluster.model = model_with(gang, generation, replicas=spec.replicas, suspend=not spec.suspend)
        case "volcano" | "kai" | "kueue" | "kubernetes":
            cluster.model = model_with(event, generation, replicas=spec.replicas)
        case "by hand":
            cluster.model = model_with(None, generation, replicas=spec.replicas)
        case int(replicas):
            cluster.model = model_with(gang, generation, replicas=replicas)
        case _:
            cluster.advance(30)


def check(cluster: PlannedCluster) -> None:
    found = pod_groups(cluster)
    for pod in cluster.pods.values():
        given = pod["metadata"].get("annotations", {})
        for kind, annotation in ANNOTATION.items():
            if annotation in given:
                assert (kind, given[annotation]) in found, (given, sorted(found))
        named = pod["spec"].get("schedulingGroup", {}).get("podGroupName")
        assert named is None or named in {name for _, name in found}, (named, sorted(found))
    lives = {f"tiny-{group.index}-{group.incarnation}" for group in cluster.status.groups}
    assert {name for _, name in found} <= lives, (sorted(found), cluster.status)


@given(EVENTS)
def test_no_pod_is_without_its_pod_group_and_none_outlives_its_incarnation(events: list[str | int]) -> None:
    cluster = PlannedCluster(model_with("volcano"))
    for event in events:
        act(cluster, event)
        cluster.step()
        check(cluster)
        assert all(labels.MODEL in each["metadata"]["labels"] for each in pod_groups(cluster).values())


@pytest.mark.parametrize("gang", ["volcano", "kueue", "kubernetes"])
def test_one_machine_has_no_scheduler_of_groups_and_the_rest_of_the_model_stays(gang: str) -> None:
    model = model_with(gang, replicas=3)
    assert without_gang(model) == tiny_model(replicas=3)
    assert without_gang(tiny_model()) == tiny_model()
