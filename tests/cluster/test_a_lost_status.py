"""A status that is gone, as after a backup was restored, is made again from the pods that run."""

from pathlib import Path

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0


def test_groups_whose_status_is_gone_run_on(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        create_model(cluster.api, namespace, "tiny", kubelet.template, replicas=3)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        before = {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)}
        patch = '[{"op": "remove", "path": "/status"}]'
        cluster.kubectl_ok("patch", "plm/tiny", "-n", namespace, "--subresource=status", "--type=json", "-p", patch)

        def recorded() -> list[tuple[int, str]]:
            model = cluster.api.get("PipelineModel", "tiny", namespace) or {}
            groups = model.get("status", {}).get("groups", [])
            return [(each["incarnation"], each["phase"]) for each in groups]

        wait_until(
            "the groups are on record", lambda: recorded() == [(1, "Ready")] * 3, SOON_SECONDS, lambda: str(recorded())
        )
        after = {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)}
        assert after == before, f"{to_json(cluster.api.get('PipelineModel', 'tiny', namespace))}\n{operator.log()}"
