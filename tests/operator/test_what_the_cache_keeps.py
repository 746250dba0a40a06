"""The operator's cache keeps all that the planner reads of a pod, and what is planned from it is the same."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.cached_observation import as_served
from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_operator.controller.client.resources import ModelKey, ObjectId
from stageline_operator.controller.telemetry.startup import startup_of
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import is_stage_pod
from stageline_operator.planner.observed.observed_pod import (
    given_up_at,
    is_given_up,
    next_look_seconds,
    read_pod,
    waits_for_containers,
)
from stageline_operator.planner.types import PodTrouble

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Path = tuple[str | int, ...]


class Recorded(Mapping[str, Any]):
    """A mapping that notes the path of each value that is read from it."""

    def __init__(self, value: Mapping[str, Any], read: set[Path], path: Path = ()) -> None:
        self._value, self._read, self._path = value, read, path

    def __getitem__(self, name: str) -> Any:
        value = self._value[name]
        self._read.add((*self._path, name))
        return recorded(value, self._read, (*self._path, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


def recorded(value: Any, read: set[Path], path: Path = ()) -> Any:
    if isinstance(value, Mapping):
        return Recorded(value, read, path)
    if isinstance(value, list):
        return [recorded(each, read, (*path, number)) for number, each in enumerate(value)]
    return value


def at(value: Any, path: Path) -> Any:
    for name in path:
        if isinstance(value, Sequence) and isinstance(name, int):
            value = value[name] if name < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def cached(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod as the operator's cache gives it back."""
    cache, served = ObjectCache(), as_served(pod, "default", 5)
    cache.put("Pod", served)
    found = cache.get(ObjectId("Pod", "default", pod["metadata"]["name"]))
    assert found is not None
    return found


def whole_pod() -> dict[str, Any]:
    """A pod with all that one can have. Each container is one that its kubelet starts again, so that none is let go."""
    sidecar = {"name": "watcher", "image": "x", "restartPolicy": "Always", "env": [{"name": "A", "value": "b"}]}
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    overlay = {"spec": {"initContainers": [sidecar], "hostNetwork": True, "overhead": {"cpu": "1"}}}
    cluster = PlannedCluster(tiny_model(template={"podTemplate": overlay, "tolerations": tolerations}))
    cluster.settle()
    pod = as_served(cluster.pod(0), "default", 5)
    pod["spec"]["nodeName"] = "node-1"
    for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        each["restartPolicy"] = "Always"
    return pod


def test_all_that_is_read_of_a_pod_is_kept() -> None:
    pod, read = whole_pod(), set[Path]()
    for phase, state in (("Pending", {"waiting": {"reason": "ContainerCreating"}}), ("Failed", {})):
        pod["status"] = {"phase": phase, "reason": "Any", "containerStatuses": [{"name": "stage", "state": state}]}
        asked = recorded(pod, read)
        read_pod(asked, NOW, {"node-2"}, PodTrouble("FailedMount", "no volume"))
        waits_for_containers(asked), given_up_at(asked), is_given_up(asked), next_look_seconds([asked], NOW)
        startup_of([asked], NOW), is_stage_pod(asked, ModelKey("default", "tiny"))
    assert ("spec", "initContainers", 0, "name") in read, "or this test shows nothing"
    kept = cached(pod)
    lost = {path for path in read if not isinstance(at(pod, path), Mapping | list) and at(kept, path) != at(pod, path)}
    assert lost == set()


def test_what_is_not_read_of_a_pods_spec_is_not_kept() -> None:
    names = {"nodeName", "initContainers", "containers"}
    kept = cached(whole_pod())["spec"]
    assert set(kept) == names
    assert {name for kind in ("initContainers", "containers") for each in kept[kind] for name in each} == {
        "name",
        "restartPolicy",
    }


TIMES = st.integers(0, 3600).map(lambda second: (NOW - timedelta(seconds=second)).isoformat())
REASONS = st.sampled_from(["ContainerCreating", "PodInitializing", "ErrImagePull", "CreateContainerError", "Odd"])
STATES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"waiting": st.fixed_dictionaries({"reason": REASONS})}),
    st.fixed_dictionaries({"running": st.fixed_dictionaries({"startedAt": TIMES})}),
    st.fixed_dictionaries(
        {"terminated": st.fixed_dictionaries({"exitCode": st.sampled_from([0, 1, 70, 137]), "finishedAt": TIMES})}
    ),
    st.just({}),
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["Ready", "ContainersReady", "PodScheduled", "DisruptionTarget"]),
            "status": st.sampled_from(["True", "False"]),
            "lastTransitionTime": TIMES,
        }
    )
)


@given(st.data())
def test_a_cached_pod_reads_as_the_whole_one_does(data: st.DataObject) -> None:
    pod = whole_pod()
    for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        each["restartPolicy"] = data.draw(st.sampled_from(["Always", "OnFailure", "Never", None]))
    statuses = {
        kind: [{"name": each["name"], "state": data.draw(STATES)} for each in pod["spec"][given]]
        for kind, given in (("initContainerStatuses", "initContainers"), ("containerStatuses", "containers"))
    }
    phase, reason = data.draw(st.sampled_from(["Pending", "Running", "Failed"])), data.draw(REASONS)
    pod["status"] = {"phase": phase, "reason": reason, "conditions": data.draw(CONDITIONS), **statuses}
    assert read_pod(cached(pod), NOW) == read_pod(pod, NOW)
