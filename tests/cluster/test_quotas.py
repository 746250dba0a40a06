"""A namespace without room for all of a group's pods: the status says which stage is refused, and why."""

from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0


def quota(pods: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"count/pods": str(pods)}},
    }


def test_a_group_that_a_quota_refuses_says_so_gives_its_places_back_and_starts_once_there_is_room(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    cluster.apply(quota(3) | {"metadata": {"name": "few", "namespace": namespace}})

    def counted() -> bool:
        return '"count/pods": "3"' in cluster.kubectl_ok("get", "quota", "few", "-n", namespace, "-o", "json")

    wait_until("the quota counts", counted, SOON_SECONDS)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        rules = {"parallelism": {"pipeline": 4}, "timeouts": {"schedulingSeconds": 5}}
        create_model(cluster.api, namespace, "tiny", kubelet.template, **rules)

        def status() -> dict[str, Any]:
            return dict((cluster.api.get("PipelineModel", "tiny", namespace) or {}).get("status") or {})

        def shown() -> str:
            return f"{to_json(status())}\n{operator.log()}"

        def refused() -> list[dict[str, Any]]:
            groups = status().get("groups", [])
            return [row for group in groups for row in group["stages"] if row.get("reason") == "QuotaExceeded"]

        (row,) = wait_until("a stage is refused", refused, SOON_SECONDS, shown)
        assert row["index"] == 3, row
        assert "exceeded quota: few" in row["message"], row

        def waits() -> bool:
            return [group["phase"] for group in status()["groups"]] == ["Waiting"]

        wait_until("it gives its places back", waits, SOON_SECONDS, shown)
        (failure,) = status()["lastFailures"]
        assert (failure["failureClass"], failure["stage"]) == ("QuotaExceeded", 3), failure
        assert not status()["groups"][0].get("restarts"), status()
        cluster.apply(quota(4) | {"metadata": {"name": "few", "namespace": namespace}})
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, shown)
