"""An object that somebody edits is applied again: seen from what the operator still owns of it, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_operator.planner.objects.field_ownership import owned_fields, owns_all_of

OURS = "stageline-operator"
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "name": "m-stages",
        "namespace": "ns",
        "labels": {"a": "1", "b": "2"},
        "ownerReferences": [{"kind": "PipelineModel", "name": "m", "uid": "u-1"}],
    },
    "spec": {
        "clusterIP": "None",
        "selector": {"a": "1"},
        "ports": [{"name": "bus", "port": 5600}, {"name": "health", "port": 9100, "protocol": "TCP"}],
        "externalIPs": ["10.0.0.1"],
    },
}
HEALTH = 'k:{"port":9100,"protocol":"TCP"}'
FIELDS: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:a": {}, "f:b": {}}, "f:ownerReferences": {'k:{"uid":"u-1"}': {}}},
    "f:spec": {
        "f:clusterIP": {},
        "f:selector": {},
        "f:ports": {
            'k:{"port":5600,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}},
            HEALTH: {".": {}, "f:name": {}, "f:port": {}, "f:protocol": {}},
        },
        "f:externalIPs": {'v:"10.0.0.1"': {}},
    },
}
"""As an API server writes it: a selector is owned as one, a port by its key, whose protocol is a default."""


def paths_to_leaves(fields: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, below in fields.items():
        if below:
            yield from paths_to_leaves(below, (*path, name))
        elif name != ".":
            yield (*path, name)


def without(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The entry after somebody took one field over: what is empty then is not listed."""
    left: dict[str, Any] = json.loads(json.dumps(fields))
    *above, last = path
    parents = [left]
    for name in above:
        parents.append(parents[-1][name])
    del parents[-1][last]
    for parent, name in reversed(list(zip(parents, above, strict=False))):
        if not parent[name]:
            del parent[name]
    return left


def test_all_that_was_applied_is_owned_whatever_else_is_there() -> None:
    assert owns_all_of(json.dumps(FIELDS), SERVICE)
    more = json.loads(json.dumps(FIELDS))
    more["f:metadata"]["f:annotations"] = {"f:note": {}}
    assert owns_all_of(json.dumps(more), SERVICE)


@pytest.mark.parametrize("path", list(paths_to_leaves(FIELDS)), ids=lambda path: "/".join(path))
def test_one_field_that_somebody_took_over_is_noticed(path: tuple[str, ...]) -> None:
    assert not owns_all_of(json.dumps(without(FIELDS, path)), SERVICE)


def test_an_object_of_which_nothing_is_owned_any_more_was_edited() -> None:
    assert not owns_all_of("{}", SERVICE)


def test_only_what_the_manager_itself_applied_counts() -> None:
    def entry(manager: str, operation: str = "Apply", **more: str) -> dict[str, Any]:
        return {"manager": manager, "operation": operation, "fieldsV1": FIELDS, **more}

    theirs = [entry("kubectl"), entry(OURS, "Update"), entry(OURS, subresource="status")]
    assert owned_fields({"managedFields": theirs}, OURS) == "{}"
    assert json.loads(owned_fields({"managedFields": [*theirs, entry(OURS)]}, OURS) or "") == FIELDS
    assert owned_fields({}, OURS) is None, "an object that doesn't say who owns what says nothing of edits"


def fields_of(value: Any) -> dict[str, Any]:
    """What an API server would write of a manifest if every list were owned as one."""
    return {f"f:{name}": fields_of(below) for name, below in value.items()} if isinstance(value, dict) else {}


def test_an_edited_object_is_applied_again_and_said_and_an_untouched_one_is_not() -> None:
    cluster = PlannedCluster(tiny_model())
    cluster.settle()
    cluster.owned = {key: fields_of(each) for key, each in cluster.objects.items() if key[0] == "Service"}
    assert cluster.step().apply == ()
    del cluster.owned["Service", "tiny-engine"]["f:spec"]["f:selector"]
    planned = cluster.step()
    assert [(each["kind"], each["metadata"]["name"]) for each in planned.apply] == [("Service", "tiny-engine")]
    assert [(event.reason, event.message) for event in planned.events] == [
        ("ObjectRestored", "Service tiny-engine was edited and is restored")
    ]
