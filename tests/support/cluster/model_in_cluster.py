"""One PipelineModel in a cluster: apply it, wait for what its status says, see everything when that does not come."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.api import wait_until
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, to_json
from stageline_api import labels

READY_SECONDS: Final = 300.0
"""A generous bound: torch is imported once for each stage, on a machine that may have two cores and other work."""


@dataclass
class ModelInCluster:
    """`nodes` is None on a foreign cluster."""

    cluster: Cluster
    namespace: str
    name: str
    nodes: SimulatedNodes | None
    manifest: dict[str, Any] = field(default_factory=dict)

    def apply(self, **spec: Any) -> None:
        """`kubectl apply` of the model with some fields of its spec replaced."""
        self.manifest["spec"] |= spec
        self.cluster.apply(self.manifest)

    def get(self) -> dict[str, Any]:
        """The model as the API server holds it."""
        found = self.cluster.api.get("PipelineModel", self.name, self.namespace)
        assert found is not None, f"PipelineModel {self.name} is gone"
        return found

    def status(self) -> dict[str, Any]:
        """Its status; empty before the operator has seen it."""
        return dict(self.get().get("status", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition; empty before there is one."""
        return condition_in(self.status(), kind)

    def pods(self, **selected: str) -> list[dict[str, Any]]:
        """Its pods, by `group`, `stage`, `incarnation` or `revision`; in order of group and stage."""
        wanted = {labels.MODEL: self.name} | {f"stageline.dev/{key}": value for key, value in selected.items()}
        found = self.cluster.api.list("Pod", self.namespace, wanted)
        return sorted(found, key=lambda pod: (pod["metadata"]["labels"][labels.GROUP], pod["metadata"]["name"]))

    def pod_uids(self) -> set[str]:
        """Which pods it has: one that was replaced has another uid, whatever its name."""
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def pod(self, stage: int, group: int = 0) -> dict[str, Any]:
        """The pod of one stage that is not being deleted."""
        found = [
            pod for pod in self.pods(stage=str(stage), group=str(group)) if "deletionTimestamp" not in pod["metadata"]
        ]
        assert len(found) == 1, self.everything()
        return found[0]

    def until(self, what: str, holds: Any, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait until `holds(status)`; returns that very status, since the next may be another."""

        def _status_that_holds() -> dict[str, Any] | None:
            status = self.status()
            return status if holds(status) else None

        found = wait_until(what, _status_that_holds, seconds, self.everything)
        assert found is not None
        return found

    def is_observed(self) -> bool:
        """Whether the operator has looked at the latest spec."""
        return _is_observed(self.get())

    def until_ready(self, groups: int = 1, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait until that many groups answer, and the condition says so for the latest spec; returns the status."""

        def _ready_model() -> dict[str, Any] | None:
            found = self.get()
            status = found.get("status", {})
            said = condition_in(status, "Ready").get("status") == "True"
            return found if _is_observed(found) and said and status.get("readyReplicas") == groups else None

        model = wait_until(f"{groups} groups are ready", _ready_model, seconds, self.everything)
        assert model is not None
        return dict(model["status"])

    def until_incarnation(self, above: int, group: int = 0, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait until a later incarnation of a group is ready."""

        def _replaced(status: dict[str, Any]) -> bool:
            found = _group(status, group)
            stages = found.get("stages", [])
            return bool(stages and found["incarnation"] > above and all(s.get("ready") for s in stages))

        return self.until(f"group {group} is ready above incarnation {above}", _replaced, seconds)

    def incarnation(self, group: int = 0) -> int:
        """Of one group, once it is listed."""
        status = self.until(f"group {group} is listed", lambda status: _group(status, group))
        return int(_group(status, group)["incarnation"])

    def container_pid(self, stage: int, container: str, group: int = 0) -> int:
        """Process id of a container on our own nodes."""
        assert self.nodes is not None
        pod = self.pod(stage, group)
        pid = self.nodes.of_pod(pod).container_pid(self.namespace, pod["metadata"]["name"], container)
        assert pid is not None, self.everything()
        return pid

    def everything(self) -> str:
        """Status, pods, events and container logs: what a person would look at."""
        parts = [to_json(self.cluster.api.get("PipelineModel", self.name, self.namespace))]
        for pod in self.pods():
            name, status = pod["metadata"]["name"], pod["status"]
            shown = {"node": pod["spec"].get("nodeName"), "phase": status.get("phase"), "reason": status.get("reason")}
            states = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
            shown["containers"] = {each["name"]: each["state"] for each in states}
            shown["conditions"] = [
                f"{c['type']}={c['status']} {c.get('message', '')}" for c in status.get("conditions", [])
            ]
            parts.append(f"--- {name} {to_json(shown)}")
            if self.nodes is not None and shown["node"] in self.nodes.by_name:
                node = self.nodes.by_name[shown["node"]]
                parts += [
                    f"{each['name']}: {node.container_log(self.namespace, name, each['name'])[-1200:]}"
                    for each in states
                ]
        parts.append(self.cluster.kubectl("get", "events", "-n", self.namespace).stdout[-4000:])
        return "\n".join(parts)


def _is_observed(model: Mapping[str, Any]) -> bool:
    return bool(model.get("status", {}).get("observedGeneration") == model["metadata"]["generation"])


def condition_in(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a status; empty when it has none of that kind."""
    return next((dict(each) for each in status.get("conditions", []) if each["type"] == kind), {})


def _group(status: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What a status says of one group; empty when it lists none of that index."""
    return next((dict(each) for each in status.get("groups", []) if each["index"] == index), {})


def model_from_file(cluster: Cluster, namespace: str, file: Path, nodes: SimulatedNodes | None) -> ModelInCluster:
    """The model of an example file, not applied yet."""
    manifest = yaml.safe_load(file.read_text(encoding="utf-8"))
    manifest["metadata"]["namespace"] = namespace
    return ModelInCluster(cluster, namespace, manifest["metadata"]["name"], nodes, manifest)


def small_model(
    cluster: Cluster, namespace: str, directory: Path, nodes: SimulatedNodes | None, name: str = "tiny", **spec: Any
) -> ModelInCluster:
    """A model of two stages from a directory of random weights, not applied yet."""
    body = {
        "model": {"source": f"file://{directory}"},
        "parallelism": {"pipeline": 2},
        "engine": {"device": "cpu", "dtype": "float32", "maxNumSeqs": 4, "maxModelLen": 256},
    }
    manifest = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": name, "namespace": namespace},
        "spec": body | spec,
    }
    return ModelInCluster(cluster, namespace, name, nodes, manifest)
