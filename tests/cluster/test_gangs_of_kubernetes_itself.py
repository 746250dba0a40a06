"""`placement.gang.scheduler: kubernetes`: whole groups are placed, or none of their pods, and by Kubernetes alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, InstantKubelet, instant_kubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS: Final = 180.0
DEVICE: Final = "example.com/device"
NAMESPACE: Final = "default"
PLACEMENT: Final = {"placement": {"gang": {"scheduler": "kubernetes"}}}
OBJECTS: Final = "podgroups.scheduling.k8s.io"


def status_of(cluster: Cluster, namespace: str) -> dict[str, Any]:
    return dict((cluster.api.get("PipelineModel", "tiny", namespace) or {}).get("status") or {})


def ready_reason(cluster: Cluster, namespace: str) -> str:
    ready = (each for each in status_of(cluster, namespace).get("conditions", []) if each["type"] == "Ready")
    return next((f"{each['reason']}: {each['message']}" for each in ready), "")


def objects(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in _listed(cluster)}


def _listed(cluster: Cluster) -> list[dict[str, Any]]:
    found = cluster.kubectl_ok("get", OBJECTS, "-n", NAMESPACE, "-o", "json")
    return [dict(each) for each in json.loads(found)["items"]]


def test_a_cluster_without_it_is_told_of_and_no_pod_is_made(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    if cluster.kubectl("get", OBJECTS).returncode == 0:
        pytest.skip("this cluster has it")
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        create_model(cluster.api, namespace, "tiny", kubelet.template, **PLACEMENT)
        wait_until(
            "the status says what is missing",
            lambda: "doesn't serve podgroups of scheduling.k8s.io/v1beta1" in ready_reason(cluster, namespace),
            SOON_SECONDS,
            lambda: f"{to_json(status_of(cluster, namespace))}\n{operator.log()}",
        )
        assert ready_reason(cluster, namespace).startswith("WriteRefused: ")
        assert cluster.api.list("Pod", namespace) == []


def test_no_pod_of_a_group_is_bound_until_all_of_them_can_be(gang_cluster: Cluster, tmp_path: Path) -> None:
    api = gang_cluster.api
    template = {"tolerations": [TOLERATION], "resources": {"limits": {DEVICE: "1"}}}
    arguments = ("--namespace", NAMESPACE, "--no-leader-elect")
    with (
        gang_cluster.connect() as client,
        instant_kubelet(client, **{DEVICE: "1"}) as first,
        operator_replica(gang_cluster.kubeconfig, tmp_path / "log", *arguments) as operator,
    ):

        def shown() -> str:
            return f"{to_json(status_of(gang_cluster, NAMESPACE))}\n{to_json(pods())}\n{operator.log()}"

        def pods() -> list[dict[str, Any]]:
            return api.list("Pod", NAMESPACE)

        def nodes_of_pods() -> list[str]:
            return sorted(each["spec"].get("nodeName", "") for each in pods())

        def until(what: str, holds: Callable[[], object]) -> None:
            wait_until(what, holds, SOON_SECONDS, shown)

        spec = {"parallelism": {"pipeline": 2}, "restart": {"backoffSeconds": 1}, **PLACEMENT}
        create_model(api, NAMESPACE, "tiny", template, **spec)

        def says_why() -> bool:
            conditions = [each for pod in pods() for each in pod.get("status", {}).get("conditions", [])]
            return any(DEVICE in each.get("message", "") for each in conditions)

        until("the scheduler has found no second device", says_why)
        assert nodes_of_pods() == ["", ""], shown()
        ((name, made),) = objects(gang_cluster).items()
        assert made["metadata"]["ownerReferences"][0]["name"] == "tiny", made
        for pod in pods():
            assert pod["spec"]["schedulingGroup"] == {"podGroupName": name}, pod["spec"]

        with instant_kubelet(client, **{DEVICE: "1"}) as second:
            wait_ready(api, NAMESPACE, "tiny", SOON_SECONDS, shown)
            assert nodes_of_pods() == sorted([first.name, second.name])

            first.end_container(next(each for each in pods() if each["spec"]["nodeName"] == first.name), 1)
            until("the next incarnation has one of its own", lambda: name not in objects(gang_cluster))
            wait_ready(api, NAMESPACE, "tiny", SOON_SECONDS, shown)
            assert len(objects(gang_cluster)) == 1, shown()

            api.delete("PipelineModel", "tiny", NAMESPACE)
            until("the model's end is the end of all", lambda: not pods() and not objects(gang_cluster))
