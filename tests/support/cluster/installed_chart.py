"""The chart on process nodes: values that suit them, and waiting until its Deployments run what was asked for."""

from typing import Any, Final

from cluster.api import wait_until
from cluster.rendered_chart import NAMESPACE
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster

AVAILABLE_SECONDS: Final = 180.0


def node_values(models: str) -> dict[str, Any]:
    """Values for process nodes; the gateway serves the namespace `models` and asks for keys."""
    return {
        "images": {part: {"repository": "stageline", "tag": "local"} for part in ("operator", "gateway", "runtime")},
        # Pods share this machine's network, and its nodes know no lifecycle hooks.
        "operator": {"listenAddress": "$(POD_IP)"},
        "gateway": {
            "listenAddress": "$(POD_IP)",
            "withdrawSeconds": 0,
            "drainSeconds": 2,
            "replicas": 1,
            "namespace": models,
            "keys": {"secretName": "gateway-keys"},
        },
    }


def everything(cluster: Cluster, nodes: SimulatedNodes) -> str:
    """What a person would look at when the release does not become ready."""
    parts = [cluster.kubectl("get", "deployments,pods,events", "-n", NAMESPACE, "-o", "wide").stdout]
    for pod in cluster.api.list("Pod", NAMESPACE):
        for container in pod["spec"]["containers"]:
            if node := nodes.by_name.get(pod["spec"].get("nodeName", "")):
                name = pod["metadata"]["name"]
                parts.append(f"{name}: {node.container_log(NAMESPACE, name, container['name'])[-1500:]}")
    return "\n".join(parts)


def until_available(cluster: Cluster, nodes: SimulatedNodes) -> None:
    """Every Deployment has rolled out what was last asked for, and runs nothing else."""

    def _available() -> bool:
        return all(
            deployment["status"].get("observedGeneration") == deployment["metadata"]["generation"]
            and deployment["status"].get("updatedReplicas")
            == deployment["status"].get("readyReplicas")
            == deployment["status"].get("replicas")
            == deployment["spec"]["replicas"]
            for deployment in cluster.api.list("Deployment", NAMESPACE)
        )

    wait_until("the Deployments are available", _available, AVAILABLE_SECONDS, lambda: everything(cluster, nodes))


def pods_of(cluster: Cluster, component: str) -> list[dict[str, Any]]:
    """Pods of the release's operator or gateway that are not being deleted."""
    found = cluster.api.list("Pod", NAMESPACE, {"app.kubernetes.io/component": component})
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
