"""An operator whose role lacks a newer right goes on with what needs it not; the others say what is missing."""

from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import RULES, condition_of, create_model, grant, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0
CLAIMS = "persistentvolumeclaims"


def test_models_that_need_the_right_say_so_until_it_is_granted_and_the_others_are_served(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    cluster.kubectl_ok("create", "serviceaccount", "operator", "-n", namespace)
    rules = RULES["workloadRules"]
    older = [rule for rule in rules if CLAIMS not in rule["resources"]]
    assert len(older) == len(rules) - 1
    grant(cluster, namespace, "Role", "operator", older)
    kubeconfig = cluster.service_account_kubeconfig(namespace, "operator", tmp_path)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(kubeconfig, tmp_path / "log", *arguments) as operator:
        cache = {"source": "hf://org/model", "cache": {"claimTemplate": {"size": "1Gi"}}}
        create_model(cluster.api, namespace, "claims", kubelet.template, model=cache)
        create_model(cluster.api, namespace, "plain", kubelet.template)
        wait_ready(cluster.api, namespace, "plain", SOON_SECONDS, operator.log)

        def ready() -> dict[str, Any]:
            return condition_of(cluster.api.get("PipelineModel", "claims", namespace))

        def shown() -> str:
            return f"{to_json(ready())}\n{operator.log()}"

        words = "the operator's role must allow to list and watch persistentvolumeclaims"
        wait_until("the other says what is missing", lambda: words in ready().get("message", ""), SOON_SECONDS, shown)
        assert ready()["reason"] == "WriteRefused", ready()
        assert "403" in ready()["message"], ready()
        assert any(CLAIMS in line["message"] for line in operator.lines()), "the log names it too"
        of_claims = {"stageline.dev/model": "claims"}
        assert cluster.api.list("Pod", namespace, of_claims) == [], "nothing is done of a step that can't be done whole"

        grant(cluster, namespace, "Role", "operator", rules)

        def made() -> bool:
            claims = cluster.api.list("PersistentVolumeClaim", namespace, of_claims)
            return len(claims) == len(cluster.api.list("Pod", namespace, of_claims)) == 2

        wait_until("claims and pods are made once it is granted", made, SOON_SECONDS, shown)
        wait_ready(cluster.api, namespace, "plain", SOON_SECONDS, operator.log)
