"""Claims for what stages prepare: each incarnation finds its index's, and none that may be needed again is deleted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_operator.planner.objects.identity import config_map_name
from stageline_operator.planner.types import kind_of

KIND = "PersistentVolumeClaim"


def model(generation: int = 1, claims: bool = True, **spec: Any) -> Any:
    cache = {"claimTemplate": {"size": "20Gi", "storageClassName": "fast"}} if claims else {}
    return tiny_model(generation, model={"source": "hf://org/name", "cache": cache}, **spec)


def claims_of(cluster: PlannedCluster) -> list[str]:
    return sorted(name for kind, name in cluster.objects if kind == KIND)


def used_by(pod: dict[str, Any]) -> str:
    (cache,) = (each for each in pod["spec"]["volumes"] if each["name"] == "cache")
    return str(cache["persistentVolumeClaim"]["claimName"])


def test_each_stage_of_each_group_has_a_claim_and_uses_it_alone() -> None:
    cluster = PlannedCluster(model(replicas=2))
    cluster.settle()
    assert claims_of(cluster) == ["tiny-cache-0-0", "tiny-cache-0-1", "tiny-cache-1-0", "tiny-cache-1-1"]
    assert sorted(map(used_by, cluster.pods.values())) == claims_of(cluster)
    assert cluster.objects[KIND, "tiny-cache-0-0"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "20Gi"}},
        "storageClassName": "fast",
    }
    for pod in cluster.pods.values():
        (prepare,) = (each for each in pod["spec"]["initContainers"] if each["name"] == "prepare")
        assert {"name": "STAGELINE_OWN_CACHE", "value": "1"} in prepare["env"]


def test_a_replaced_group_finds_the_claims_of_the_one_before() -> None:
    cluster = PlannedCluster(model())
    cluster.settle()
    before = sorted(map(used_by, cluster.pods.values()))
    del cluster.objects["Pod", min(cluster.pods)]
    for _ in range(5):
        cluster.settle()
        cluster.advance(60)
    (group,) = cluster.status.groups
    assert group.incarnation > 1
    assert sorted(map(used_by, cluster.pods.values())) == before


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 0}, {"engine": {"seed": 7}}])
def test_what_may_come_back_finds_its_claims(change: dict[str, Any]) -> None:
    cluster = PlannedCluster(model())
    cluster.settle()
    cluster.make_ready()
    before = claims_of(cluster)
    cluster.model = model(2, **change)
    for _ in range(5):
        cluster.settle()
        cluster.make_ready()
        cluster.advance(60)
    assert set(before) <= set(claims_of(cluster))


def test_claims_go_with_the_groups_and_stages_that_go_and_with_the_field() -> None:
    cluster = PlannedCluster(model(replicas=3, parallelism={"pipeline": 3}))
    changed = [model(2, rollout={"maxSurge": 0, "maxUnavailable": 1}), model(3, claims=False)]
    left = [["tiny-cache-0-0", "tiny-cache-0-1"], []]
    for step in (None, *zip(changed, left, strict=True)):
        cluster.model = cluster.model if step is None else step[0]
        for _ in range(6):
            cluster.settle()
            cluster.make_ready()
            cluster.advance(60)
        assert step is None or claims_of(cluster) == step[1]


EVENTS = st.lists(st.sampled_from(["ready", "kill", "suspend", "advance", "seed", "claims", 0, 1, 2, 3]), max_size=30)


@given(EVENTS)
def test_no_pod_is_without_its_claim(events: list[str | int]) -> None:
    cluster = PlannedCluster(model())
    spec: dict[str, Any] = {"replicas": 1, "suspend": False, "engine": {"seed": 0}, "claims": True}
    for generation, event in enumerate(events, 2):
        match event:
            case "ready":
                cluster.make_ready()
            case "kill" if cluster.pods:
                del cluster.objects["Pod", min(cluster.pods)]
            case "advance":
                cluster.advance(30)
            case "suspend" | "claims":
                spec[event] = not spec[event]
            case "seed":
                spec["engine"] = {"seed": generation}
            case int(replicas):
                spec["replicas"] = replicas
        cluster.model = model(generation, **spec)
        cluster.step()
        for pod in cluster.pods.values():
            (cache,) = (each for each in pod["spec"]["volumes"] if each["name"] == "cache")
            if "persistentVolumeClaim" in cache:
                assert used_by(pod) in claims_of(cluster), (event, cluster.status)


def specs_of(cluster: PlannedCluster) -> dict[str, str]:
    return {name: cluster.objects[KIND, name]["spec"]["storageClassName"] for name in claims_of(cluster)}


def with_class(name: str, generation: int) -> Any:
    cache = {"claimTemplate": {"size": "20Gi", "storageClassName": name}}
    return tiny_model(generation, model={"source": "hf://org/name", "cache": cache}, replicas=2)


def test_claims_are_made_again_for_a_revision_that_they_can_not_become_and_never_under_a_pod() -> None:
    cluster = PlannedCluster(with_class("slow", 1))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    cluster.model = with_class("fast", 2)
    for _ in range(20):
        in_use = {used_by(pod) for pod in cluster.pods.values()}
        before = {name: cluster.objects[KIND, name] for name in in_use}
        planned = cluster.step()
        gone = {each.name for each in planned.delete if each.kind == KIND}
        assert not gone & in_use, gone
        assert all(cluster.objects[KIND, name] is each for name, each in before.items()), "a claim in use is as it was"
        cluster.make_ready()
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "AllGroupsReady"), cluster.status
    assert {specs_of(cluster)[used_by(pod)] for pod in cluster.pods.values()} == {"fast"}
    assert "ClaimReplaced" in cluster.events


def test_a_claim_stays_when_the_old_template_is_back_before_it_was_made_again() -> None:
    cluster = PlannedCluster(with_class("slow", 1))
    cluster.settle()
    for name in list(cluster.pods):
        del cluster.objects["Pod", name]
    cluster.unchangeable = {(KIND, name) for name in claims_of(cluster)}
    before = {name: cluster.objects[KIND, name] for name in claims_of(cluster)}
    cluster.step()
    assert {name: cluster.objects[KIND, name] for name in claims_of(cluster)} == before


def test_a_plan_says_which_groups_need_what() -> None:
    cluster = PlannedCluster(model(replicas=2))
    planned = cluster.step()
    needed = {kind_of(each) + " " + each["metadata"]["name"]: kind_of(each) for each in planned.apply}
    found = {name: planned.needed_by.get((kind, name.partition(" ")[2])) for name, kind in needed.items()}
    assert found.pop(f"ConfigMap {config_map_name(cluster.model, planned.status.update_revision)}") == frozenset({0, 1})
    assert found.pop("PodDisruptionBudget tiny") == frozenset(), "no pod reads it"
    of_groups = {name: groups for name, groups in found.items() if groups is not None}
    assert of_groups == {
        "NetworkPolicy tiny-0-1": {0},
        "NetworkPolicy tiny-1-1": {1},
        "PersistentVolumeClaim tiny-cache-0-0": {0},
        "PersistentVolumeClaim tiny-cache-0-1": {0},
        "PersistentVolumeClaim tiny-cache-1-0": {1},
        "PersistentVolumeClaim tiny-cache-1-1": {1},
    }
