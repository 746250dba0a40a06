"""What a drain of nodes may take of a model, before the real disruption controller; pods run nothing."""

from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0


def test_a_drain_takes_one_group_waits_for_it_and_is_not_held_up_by_one_that_stays_down(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        create_model(cluster.api, namespace, "tiny", kubelet.template, replicas=3, restart={"maxRestarts": 1})
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)

        def allowed() -> int:
            (budget,) = cluster.api.list("PodDisruptionBudget", namespace)
            status = budget.get("status", {})
            if status.get("observedGeneration") != budget["metadata"]["generation"]:
                return -1
            return int(status["disruptionsAllowed"])

        def shown() -> str:
            budgets = to_json(cluster.api.list("PodDisruptionBudget", namespace))
            return f"{budgets}\n{to_json(cluster.api.get('PipelineModel', 'tiny', namespace))}\n{operator.log()}"

        def groups() -> list[dict[str, Any]]:
            return list((cluster.api.get("PipelineModel", "tiny", namespace) or {})["status"]["groups"])

        def phases() -> list[str]:
            return [group["phase"] for group in groups()]

        def evict(pod: str) -> int:
            return cluster.api.evict(pod, namespace).status_code

        wait_until("one may go", lambda: allowed() == 1, SOON_SECONDS, shown)
        kubelet.holds = True
        try:
            assert evict("tiny-0-1-0") == 201
            wait_until("its group begins anew", lambda: groups()[0]["incarnation"] == 2, SOON_SECONDS, shown)
            wait_until("nothing more may go", lambda: allowed() == 0, SOON_SECONDS, shown)
            assert evict("tiny-1-1-0") == 429
        finally:
            kubelet.holds = False
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, shown)
        wait_until("one may go again", lambda: allowed() == 1, SOON_SECONDS, shown)
        for incarnation in (1, 2):
            pod = cluster.api.get("Pod", f"tiny-1-{incarnation}-1", namespace)
            assert pod is not None
            kubelet.end_container(pod, 66, "out of device memory")
            if incarnation == 1:
                wait_until("it begins anew", lambda: groups()[1]["incarnation"] == 2, SOON_SECONDS, shown)
                wait_until("it is back", lambda: phases() == ["Ready"] * 3, SOON_SECONDS, shown)
        wait_until("it is left down", lambda: phases() == ["Ready", "Failed", "Ready"], SOON_SECONDS, shown)
        wait_until("the others may be drained", lambda: allowed() == 1, SOON_SECONDS, shown)
        assert evict("tiny-2-1-0") == 201, shown()
