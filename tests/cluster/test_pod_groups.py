"""PodGroups for a scheduler that places whole groups, on an API server that has the kind, or does not yet."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0
CRD = "podgroups.scheduling.volcano.sh"
DEFINITION: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": CRD},
    "spec": {
        "group": "scheduling.volcano.sh",
        "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "minMember": {"type": "integer", "format": "int32"},
                                    "queue": {"type": "string"},
                                },
                            }
                        },
                    }
                },
            }
        ],
    },
}
"""As much of Volcano's kind as is written."""


def test_without_its_kind_there_is_a_reason_and_no_pod_and_with_it_each_incarnation_has_one_of_its_own(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    if cluster.kubectl("get", "crd", CRD).returncode == 0:
        pytest.skip("needs a cluster without Volcano: its kind is made and deleted here")
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:

        def status() -> dict[str, Any]:
            return dict((cluster.api.get("PipelineModel", "tiny", namespace) or {}).get("status") or {})

        def shown() -> str:
            return f"{to_json(status())}\n{operator.log()}"

        def reason() -> str:
            ready = (each for each in status().get("conditions", []) if each["type"] == "Ready")
            return next((f"{each['reason']}: {each['message']}" for each in ready), "")

        def pod_groups() -> dict[str, dict[str, Any]]:
            found = cluster.kubectl_ok("get", CRD, "-n", namespace, "-o", "json")
            return {each["metadata"]["name"]: each for each in json.loads(found)["items"]}

        def pods() -> list[dict[str, Any]]:
            return cluster.api.list("Pod", namespace)

        gang = {"gang": {"scheduler": "volcano", "queue": "models"}}
        spec = {"parallelism": {"pipeline": 2}, "placement": gang, "restart": {"backoffSeconds": 1}}
        create_model(cluster.api, namespace, "tiny", kubelet.template, **spec)
        wait_until(
            "the status says what is missing", lambda: "scheduling.volcano.sh/v1beta1" in reason(), SOON_SECONDS, shown
        )
        assert reason().startswith("WriteRefused: "), reason()
        assert pods() == [], shown()

        cluster.apply(DEFINITION)
        try:
            wait_until("both pods are made", lambda: len(pods()) == 2, SOON_SECONDS, shown)
            ((first, made),) = pod_groups().items()
            assert made["spec"] == {"minMember": 2, "queue": "models"}
            assert made["metadata"]["ownerReferences"][0]["name"] == "tiny"
            for pod in pods():
                assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == first
                assert pod["spec"]["schedulerName"] == "volcano"

            uids = {pod["metadata"]["uid"] for pod in pods()}
            cluster.kubectl_ok("delete", CRD, first, "-n", namespace, "--wait=true")
            wait_until("what was deleted by hand is there again", lambda: first in pod_groups(), SOON_SECONDS, shown)
            assert {pod["metadata"]["uid"] for pod in pods()} == uids, "no pod was replaced for it"

            cluster.api.delete("Pod", pods()[0]["metadata"]["name"], namespace, grace_seconds=0)

            def replaced() -> bool:
                return len(pod_groups()) == 1 and first not in pod_groups() and len(pods()) == 2

            wait_until("the next incarnation has a PodGroup of its own alone", replaced, SOON_SECONDS, shown)
            cluster.api.patch("PipelineModel", "tiny", {"spec": {"replicas": 0}}, namespace)
            wait_until("none is left of no group", lambda: pod_groups() == {}, SOON_SECONDS, shown)
        finally:
            cluster.kubectl_ok("delete", "plm", "tiny", "-n", namespace, "--wait=true")
            cluster.kubectl_ok("delete", "crd", CRD, "--wait=true")
