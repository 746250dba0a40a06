"""What the planner is told: the model's own pods and objects, of whatever life, and nobody else's."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.loop.reconciler import begins_another_life, needs_fresh_view
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import node_losses, observe, recorded_status
from stageline_operator.planner.observed.node_losses import NodeLosses
from stageline_operator.planner.types import Deletion, Plan

KEY = ModelKey("ns", "m")
STATUS = PipelineModelStatus()
NOW = datetime(2026, 1, 1, tzinfo=UTC)
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
    seen = observe(cache, KEY, PipelineModelStatus(), (), {"own": "0-3", "gone": "4-7"}, {}, NOW)
    assert {pod["metadata"]["name"] for pod in seen.pods} == {"own", "earlier", "orphan"}
    assert seen.layers_of_pod == {"own": "0-3"}


def test_objects_count_only_while_they_are_this_models_and_stay() -> None:
    own = {labels.MODEL: "m"}
    cache = cache_of(
        ("Service", thing("m-engine", own, pipeline_model.KIND)),
        ("Service", thing("m-stages", own, pipeline_model.KIND, uid="u-before")),
        ("ConfigMap", thing("m-1", own, pipeline_model.KIND, deletionTimestamp="2026-01-01T00:00:00Z")),
    )
    seen = observe(cache, KEY, PipelineModelStatus(), ["m-bus"], {}, {}, NOW)
    assert seen.objects == {("Service", "m-engine"), ("Secret", "m-bus")}


def test_what_objects_were_made_from_is_seen_in_what_they_carry() -> None:
    own = {labels.MODEL: "m"}
    hashed = thing("m-engine", own, pipeline_model.KIND, annotations={labels.APPLIED_HASH: "abc"})
    config = thing("m-r1", own | {labels.REVISION: "r1"}, pipeline_model.KIND) | {"data": {"spec.json": '{"a": 1}'}}
    broken = thing("m-r2", own | {labels.REVISION: "r2"}, pipeline_model.KIND) | {"data": {"spec.json": "{"}}
    cache = cache_of(("Service", hashed), ("ConfigMap", config), ("ConfigMap", broken))
    seen = observe(cache, KEY, STATUS, (), {}, {}, NOW)
    assert seen.applied_hashes == {("Service", "m-engine"): "abc"}
    assert seen.revision_specs == {"r1": {"a": 1}}


def test_a_status_that_cannot_be_read_is_as_good_as_none() -> None:
    assert recorded_status({"status": {"groups": "many"}}) == PipelineModelStatus()
    assert recorded_status({}) == PipelineModelStatus()


UNREACHABLE = "node.kubernetes.io/unreachable"


def node(name: str, *taints: tuple[str, str], version: str = "1", added: datetime = NOW) -> dict[str, Any]:
    said = [{"key": key, "effect": effect, "timeAdded": added.isoformat()} for key, effect in taints]
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version}, "spec": {"taints": said}}


def losses_of(*nodes: dict[str, Any], seconds: float = 60) -> NodeLosses:
    """Of the nodes that pods run on: all of these, and one that there is no more."""
    cache = cache_of(*(("Node", each) for each in nodes))
    names = [each["metadata"]["name"] for each in nodes] + ["gone"]
    pods = [{"spec": {"nodeName": name}} for name in names] + [{"spec": {}}]
    return node_losses(cache, pods, NOW + timedelta(seconds=seconds))


WELL = [node(f"well-{number}") for number in range(4)]


def test_a_node_is_lost_when_it_is_gone_or_given_up_on() -> None:
    given_up = node("dead", (UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute"))
    out = node("out", ("node.kubernetes.io/out-of-service", "NoExecute"))
    slow = node("slow", ("node.kubernetes.io/not-ready", "NoExecute"))
    found = losses_of(*WELL, slow, given_up, out)
    assert (set(found.lost), set(found.unheard)) == ({"dead", "out", "gone"}, set())


def test_a_node_that_is_only_closed_to_new_pods_is_not_lost() -> None:
    """Kubernetes withholds NoExecute when it doubts that the node is at fault."""
    found = losses_of(*WELL, node("silent", (UNREACHABLE, "NoSchedule")), seconds=3600)
    assert (set(found.lost), set(found.unheard)) == ({"gone"}, {"silent"})


def test_a_node_counts_as_lost_only_when_others_have_had_the_time_to_follow() -> None:
    given_up = node("dead", (UNREACHABLE, "NoExecute"))
    assert losses_of(*WELL, given_up, seconds=9).unheard == {"dead"}
    assert losses_of(*WELL, given_up, seconds=10).lost == {"dead", "gone"}


@pytest.mark.parametrize(
    ("silent", "total", "counts_as_lost"),
    [
        (1, 1, False),
        (1, 2, True),
        (2, 2, False),
        (2, 3, True),
        (3, 3, False),
        (3, 5, False),
        (3, 6, True),
        (5, 10, True),
    ],
)
def test_when_most_nodes_look_lost_at_once_none_is(silent: int, total: int, counts_as_lost: bool) -> None:
    names = [f"node-{number}" for number in range(total)]
    dead = [node(name, (UNREACHABLE, "NoExecute")) for name in names[:silent]]
    found = losses_of(*dead, *(node(name) for name in names[silent:]))
    assert found.lost - {"gone"} == (set(names[:silent]) if counts_as_lost else set())
    assert found.unheard == (set() if counts_as_lost else set(names[:silent]))
    assert counts_as_lost or f"{silent} of {total} nodes can't be reached" in found.why


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
    nodes = [node("well"), node("dead", (UNREACHABLE, "NoExecute"))]
    cache = cache_of(*(("Pod", pod) for _, pod in pods), *(("Node", each) for each in nodes))
    later = NOW + timedelta(seconds=60)
    assert observe(cache, KEY, STATUS, (), {}, {}, later, watches_nodes=True).lost_nodes == {"dead"}
    assert observe(cache, KEY, STATUS, (), {}, {}, later).lost_nodes == frozenset()


def test_a_taint_wakes_the_models_that_have_pods_on_the_node() -> None:
    woken: list[object] = []
    cache = ObjectCache(woken.append)
    cache.put("Pod", thing("p", STAGE, pipeline_model.KIND) | {"spec": {"nodeName": "a"}})
    woken.clear()

    cache.put("Node", node("a"))
    woken.clear()
    cache.put("Node", node("a", version="2"))
    assert woken == []
    cache.put("Node", node("a", (UNREACHABLE, "NoSchedule"), version="3"))
    assert woken == [KEY]
    cache.put("Node", node("a", (UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute"), version="4"))
    assert woken == [KEY, KEY]
