"""Claims for what stages prepare: each incarnation finds its index's, and none that may be needed again is deleted."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, tiny_model

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


@settings(max_examples=80, deadline=None)
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
