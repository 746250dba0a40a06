"""What the planner is told: the model's own pods and objects, of whatever life, and nobody else's."""

from typing import Any

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_api.resource.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop.reconciler import begins_another_life, needs_fresh_view
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import lost_nodes, observe, recorded_status
from stageline_operator.planner.types import Deletion, Plan

KEY = ModelKey("ns", "m")
STATUS = PipelineModelStatus()
STAGE = {labels.MODEL: "m", labels.GROUP: "0", labels.STAGE: "0", labels.INCARNATION: "1"}


def thing(name: str, own_labels: dict[str, str], owner: str | None, uid: str = "u-m", **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": name,
        "resourceVersion": "5",
        "labels": own_labels,
    }
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": owner, "name": "m", "uid": uid, "controller": True}]
    return {"metadata": metadata | more, "spec": {}, "status": {}}


def cache_of(*things: tuple[str, dict[str, Any]]) -> ObjectCache:
    cache = ObjectCache()
    model = {"metadata": {"name": "m", "namespace": "ns", "uid": "u-m", "resourceVersion": "1"}, "spec": {}}
    cache.put(pipeline_model.KIND, model)
    for kind, each in things:
        cache.put(kind, each)
    return cache


def test_pods_of_an_earlier_life_and_orphans_are_seen_and_strangers_are_not() -> None:
    cache = cache_of(
        ("Pod", thing("own", STAGE, pipeline_model.KIND)),
        ("Pod", thing("earlier", STAGE, pipeline_model.KIND, uid="u-before")),
        ("Pod", thing("orphan", STAGE, None)),
        ("Pod", thing("of-a-job", STAGE, "Job")),
        ("Pod", thing("odd-label", STAGE | {labels.STAGE: "zero"}, pipeline_model.KIND)),
    )
    seen = observe(cache, KEY, PipelineModelStatus(), (), {"own": "0-3", "gone": "4-7"}, {})
    assert {pod["metadata"]["name"] for pod in seen.pods} == {"own", "earlier", "orphan"}
    assert seen.layers_of_pod == {"own": "0-3"}


def test_objects_count_only_while_they_are_this_models_and_stay() -> None:
    own = {labels.MODEL: "m"}
    cache = cache_of(
        ("Service", thing("m-engine", own, pipeline_model.KIND)),
        ("Service", thing("m-stages", own, pipeline_model.KIND, uid="u-before")),
        ("ConfigMap", thing("m-1", own, pipeline_model.KIND, deletionTimestamp="2026-01-01T00:00:00Z")),
    )
    seen = observe(cache, KEY, PipelineModelStatus(), ["m-bus"], {}, {})
    assert seen.objects == {("Service", "m-engine"), ("Secret", "m-bus")}


def test_what_objects_were_made_from_is_seen_in_what_they_carry() -> None:
    own = {labels.MODEL: "m"}
    hashed = thing("m-engine", own, pipeline_model.KIND, annotations={labels.APPLIED_HASH: "abc"})
    config = thing("m-r1", own | {labels.REVISION: "r1"}, pipeline_model.KIND) | {"data": {"spec.json": '{"a": 1}'}}
    broken = thing("m-r2", own | {labels.REVISION: "r2"}, pipeline_model.KIND) | {"data": {"spec.json": "{"}}
    seen = observe(cache_of(("Service", hashed), ("ConfigMap", config), ("ConfigMap", broken)), KEY, STATUS, (), {}, {})
    assert seen.applied_hashes == {("Service", "m-engine"): "abc"}
    assert seen.revision_specs == {"r1": {"a": 1}}


def test_a_status_that_cannot_be_read_is_as_good_as_none() -> None:
    assert recorded_status({"status": {"groups": "many"}}) == PipelineModelStatus()
    assert recorded_status({}) == PipelineModelStatus()


def test_a_node_is_lost_when_it_is_gone_or_given_up_on() -> None:
    cache = cache_of()
    taints = {
        "well": [],
        "slow": [{"key": "node.kubernetes.io/not-ready"}],
        "dead": [{"key": "node.kubernetes.io/unreachable"}],
    }
    for name, own in taints.items():
        cache.put("Node", {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"taints": own}})
    assert lost_nodes(cache, {"well", "slow", "dead", "gone", ""}) == {"dead", "gone"}


def test_taking_away_needs_a_fresh_view_and_making_does_not() -> None:
    def group(incarnation: int) -> PipelineModelStatus:
        return PipelineModelStatus(groups=(GroupStatus(index=0, incarnation=incarnation),))

    now = "2026-01-01T00:00:00Z"
    failed = FailureRecord.model_validate({"time": now, "group": 0, "incarnation": 1, "failureClass": "NodeLost"})
    with_failure = group(1).model_copy(update={"last_failures": (failed,)})
    assert not needs_fresh_view(Plan(group(1), apply=({"kind": "Pod"},)), group(1))
    assert not needs_fresh_view(Plan(group(1)), PipelineModelStatus())
    assert needs_fresh_view(Plan(group(1), delete=(Deletion("Pod", "p"),)), group(1))
    assert needs_fresh_view(Plan(with_failure), group(1))
    assert begins_another_life(Plan(group(2)), group(1))
    assert needs_fresh_view(Plan(group(2)), group(1))


def test_a_models_lost_nodes_are_observed_where_nodes_are_watched() -> None:
    pods = [(name, thing(name, STAGE, pipeline_model.KIND) | {"spec": {"nodeName": name}}) for name in ("well", "dead")]
    cache = cache_of(*(("Pod", pod) for _, pod in pods))
    for name, keys in {"well": [], "dead": ["node.kubernetes.io/unreachable"]}.items():
        node = {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}}
        cache.put("Node", node | {"spec": {"taints": [{"key": key} for key in keys]}})
    assert observe(cache, KEY, PipelineModelStatus(), (), {}, {}, watches_nodes=True).lost_nodes == {"dead"}
    assert observe(cache, KEY, PipelineModelStatus(), (), {}, {}).lost_nodes == frozenset()


def test_a_taint_wakes_the_models_that_have_pods_on_the_node() -> None:
    woken: list[object] = []
    cache = ObjectCache(woken.append)
    cache.put("Pod", thing("p", STAGE, pipeline_model.KIND) | {"spec": {"nodeName": "a"}})
    woken.clear()

    def _node(version: str, *taints: str) -> dict[str, Any]:
        metadata = {"name": "a", "uid": "u", "resourceVersion": version}
        return {"metadata": metadata, "spec": {"taints": [{"key": key} for key in taints]}}

    cache.put("Node", _node("1"))
    woken.clear()
    cache.put("Node", _node("2"))
    assert woken == []
    cache.put("Node", _node("3", "node.kubernetes.io/unreachable"))
    assert woken == [KEY]
