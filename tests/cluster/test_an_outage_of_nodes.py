"""No kubelet reaches the API server any more: what serves is left alone, and the status says what is waited for."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, instant_kubelet
from cluster.operator_under_test import condition_of, create_model, operator_replica, wait_ready
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 240.0
UNREACHABLE = "node.kubernetes.io/unreachable"


def test_when_every_node_falls_silent_no_group_is_replaced(
    cluster: Cluster, namespace: str, nodes: SimulatedNodes, tmp_path: Path
) -> None:
    """They lapse one after the other, so that the control plane gives the first up before it knows of the others."""
    with cluster.connect() as client, ExitStack() as stack:
        kubelets = [stack.enter_context(instant_kubelet(client)) for _ in range(2)]
        arguments = ("--namespace", namespace, "--no-leader-elect")
        operator = stack.enter_context(operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments))
        stages = [each.selection for each in kubelets]
        create_model(cluster.api, namespace, "tiny", {"tolerations": [TOLERATION]}, stages=stages)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        before = {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)}

        def ready() -> dict[str, Any]:
            return condition_of(cluster.api.get("PipelineModel", "tiny", namespace))

        def taints() -> dict[str, list[str]]:
            found = {each["metadata"]["name"]: each["spec"].get("taints") or [] for each in cluster.api.list("Node")}
            return {name: [f"{t['key']}:{t['effect']}" for t in own] for name, own in found.items()}

        kubelets[0].end()
        for node in nodes.by_name.values():
            node.freeze()
        kubelets[1].end()

        def all_silent() -> bool:
            return all(f"{UNREACHABLE}:NoSchedule" in own for own in taints().values())

        wait_until("every node looks lost", all_silent, SOON_SECONDS, lambda: to_json(taints()))
        wait_until("the model says so", lambda: ready().get("reason") == "NodeUnreachable", SOON_SECONDS, operator.log)
        # Longer than a single lost node is waited for.
        passes = operator.samples("stageline_operator_reconcile_total")[("done",)]
        wait_until(
            "it looks again and again",
            lambda: operator.samples("stageline_operator_reconcile_total")[("done",)] >= passes + 4,
            SOON_SECONDS,
            operator.log,
        )
        after = {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)}
        status = cluster.api.get("PipelineModel", "tiny", namespace)
        assert after == before, f"{to_json(status)}\n{operator.log()}"
        assert "nodes can't be reached" in ready()["message"], to_json(status)
        nodes.recover()
