"""Claims for prepared weights on the real API server: kept over incarnations, gone with the group, refused in words."""

from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0
CLAIMS = {"model": {"source": "hf://org/name", "cache": {"claimTemplate": {"size": "1Gi", "storageClassName": "none"}}}}


def test_claims_outlive_incarnations_and_go_with_the_field_and_a_quota_that_refuses_them_is_the_reason(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": namespace},
        "spec": {"hard": {"persistentvolumeclaims": "1"}},
    }
    cluster.apply(quota)

    def counted() -> bool:
        return '"persistentvolumeclaims": "1"' in cluster.kubectl_ok(
            "get", "quota", "few", "-n", namespace, "-o", "json"
        )

    wait_until("the quota counts", counted, SOON_SECONDS)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:

        def status() -> dict[str, Any]:
            return dict((cluster.api.get("PipelineModel", "tiny", namespace) or {}).get("status") or {})

        def shown() -> str:
            return f"{to_json(status())}\n{operator.log()}"

        def reason() -> str:
            ready = (each for each in status().get("conditions", []) if each["type"] == "Ready")
            return next((f"{each['reason']}: {each['message']}" for each in ready), "")

        def claims() -> dict[str, str]:
            found = cluster.api.list("PersistentVolumeClaim", namespace)
            return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}

        def pods() -> set[str]:
            return {each["metadata"]["name"] for each in cluster.api.list("Pod", namespace)}

        def seen_by_the_operator() -> set[str]:
            stages = [stage for group in status().get("groups", []) for stage in group["stages"]]
            return {stage["pod"] for stage in stages if stage["reason"] == "Unschedulable"}

        create_model(cluster.api, namespace, "tiny", kubelet.template, **CLAIMS, restart={"backoffSeconds": 1})
        wait_until("the status says what is refused", lambda: "exceeded quota: few" in reason(), SOON_SECONDS, shown)
        assert reason().startswith("WriteRefused: "), reason()
        assert pods() == set(), shown()
        cluster.kubectl_ok("delete", "quota", "few", "-n", namespace)
        wait_until("both pods are made", lambda: len(pods()) == 2, SOON_SECONDS, shown)
        made, first = claims(), pods()
        # A pod that goes before the operator has seen it is made again in the same incarnation.
        wait_until("the operator has seen both", lambda: seen_by_the_operator() == first, SOON_SECONDS, shown)
        assert sorted(made) == ["tiny-cache-0-0", "tiny-cache-0-1"]
        cluster.api.delete("Pod", min(first), namespace, grace_seconds=0)
        wait_until(
            "the next incarnation is there", lambda: len(pods()) == 2 and not pods() & first, SOON_SECONDS, shown
        )
        assert claims() == made, shown()
        cluster.api.patch("PipelineModel", "tiny", {"spec": {"model": {"cache": None}}}, namespace)
        wait_until("nothing asks for them", lambda: claims() == {}, SOON_SECONDS, shown)
