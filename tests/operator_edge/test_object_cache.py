"""The operator's picture of the cluster: never back in time, no ghosts, and every change wakes the right model."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stageline_api import labels
from stageline_operator.controller.client.resources import ModelKey, ObjectId
from stageline_operator.controller.view.object_cache import ObjectCache

KEY = ModelKey("ns", "m")
POD = ObjectId("Pod", "ns", "m-0-1-0")


def pod(version: int, uid: str = "u1", name: str = "m-0-1-0", model: str = "m", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": {labels.MODEL: model}}, "spec": {"nodeName": "n"}, "status": status}


def test_an_older_version_changes_nothing() -> None:
    woken: list[ModelKey] = []
    cache = ObjectCache(woken.append)
    assert cache.put("Pod", pod(7, phase="Running"))
    assert not cache.put("Pod", pod(5, phase="Pending"))
    assert not cache.put("Pod", pod(7, phase="Pending"))
    found = cache.get(POD)
    assert found is not None
    assert found["status"] == {"phase": "Running"}
    assert woken == [KEY]


def test_a_late_event_does_not_bring_back_what_was_deleted() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod(5))
    assert cache.remove("Pod", pod(6))
    assert not cache.put("Pod", pod(9))
    assert cache.get(POD) is None
    assert cache.put("Pod", pod(10, uid="u2")), "the next life of the name is another object"


def test_the_deletion_of_an_earlier_life_does_not_end_the_next_one() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod(9, uid="u2"))
    assert not cache.remove("Pod", pod(8, uid="u1"))
    assert cache.get(POD) is not None


def test_a_full_list_ends_ghosts_and_spares_what_is_newer_than_itself() -> None:
    woken: list[ModelKey] = []
    cache = ObjectCache(woken.append)
    cache.put("Pod", pod(3, name="ghost", uid="g"))
    cache.put("Pod", pod(4, name="kept", uid="k"))
    cache.put("Pod", pod(30, name="newer", uid="n"))
    cache.put("Pod", pod(3, name="other", uid="o", model="other"))
    woken.clear()
    wrong = cache.replace("Pod", "ns", [pod(4, name="kept", uid="k"), pod(5, name="missed", uid="i")], 20, KEY)
    names = {identity.name for identity, _ in cache.of_kind("Pod")}
    assert names == {"kept", "missed", "newer", "other"}
    assert wrong == 2
    assert set(woken) == {KEY}
    cache.replace("Pod", "elsewhere", [], 40)
    assert {identity.name for identity, _ in cache.of_kind("Pod")} == names
    cache.replace("Pod", "", [], 40)
    assert not list(cache.of_kind("Pod"))


def test_what_nobody_reads_is_not_kept() -> None:
    cache = ObjectCache()
    manifest = pod(1)
    manifest["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    manifest["spec"]["containers"] = [{"name": "stage", "env": [{"name": "TOKEN", "value": "s3cret"}]}]
    cache.put("Pod", manifest)
    assert "s3cret" not in str(cache.get(POD))
    assert "managedFields" not in str(cache.get(POD))


def test_of_an_applied_object_only_what_the_operator_owns_is_kept() -> None:
    cache = ObjectCache()
    ours = {"manager": "stageline-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:selector": {}}}}
    theirs = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:ports": {}}}}
    metadata = {"name": "m-engine", "namespace": "ns", "resourceVersion": "1", "managedFields": [ours, theirs]}
    cache.put("Service", {"metadata": metadata, "spec": {"selector": {"a": "1"}}})
    identity = ObjectId("Service", "ns", "m-engine")
    kept = cache.get(identity)
    assert kept is not None
    assert kept["ownedFields"] == '{"f:spec":{"f:selector":{}}}'
    assert "ports" not in str(kept)
    assert "spec" not in kept


def test_objects_left_of_a_model_that_is_gone_keep_its_key() -> None:
    cache = ObjectCache()
    cache.put("Pod", pod(1))
    assert cache.model_keys() == [KEY]
    cache.remove("Pod", pod(2))
    assert cache.model_keys() == []


@given(st.permutations([("put", 1), ("put", 2), ("put", 3), ("remove", 3)]))
def test_the_order_of_events_does_not_matter_once_the_deletion_came(events: list[tuple[str, int]]) -> None:
    """Own writes and watch events of one life arrive in any order; in the end it is gone."""
    cache = ObjectCache()
    for kind, version in events:
        if kind == "put":
            cache.put("Pod", pod(version))
        else:
            cache.remove("Pod", pod(version))
    assert cache.get(POD) is None
