"""What the operator decides of failures and of room, before the real scheduler and controllers; pods run nothing."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, InstantKubelet, instant_kubelet
from cluster.operator_under_test import RULES, condition_of, create_model, grant, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json
from stageline_api import labels
from stageline_api.failures import FailureClass, TerminationMessage

SOON_SECONDS = 180.0
LATE_SECONDS = 300.0
"""For what may take several attempts, each up to a minute after the one before."""
SLOT = {"resources": {"limits": {"example.org/slot": "1"}, "requests": {"example.org/slot": "1"}}}


@pytest.fixture
def kubelets(cluster: Cluster) -> Iterator[list[InstantKubelet]]:
    """Two nodes, each with room for one stage that asks for a slot."""
    with cluster.connect() as client, ExitStack() as stack:
        yield [stack.enter_context(instant_kubelet(client, **{"example.org/slot": "1"})) for _ in range(2)]


def status_of(cluster: Cluster, namespace: str, name: str = "tiny") -> dict[str, Any]:
    model = cluster.api.get("PipelineModel", name, namespace)
    return dict((model or {}).get("status") or {})


def is_ready(cluster: Cluster, namespace: str, name: str) -> bool:
    return condition_of(cluster.api.get("PipelineModel", name, namespace)).get("status") == "True"


def test_a_lost_node_that_the_operator_may_not_look_at_is_the_cause_and_holds_nothing_up(
    cluster: Cluster, namespace: str, kubelets: list[InstantKubelet], tmp_path: Path
) -> None:
    """Its rights end at the namespace. The other stage's last words come first, as they would."""
    cluster.kubectl_ok("create", "serviceaccount", "operator", "-n", namespace)
    grant(cluster, namespace, "Role", "operator", RULES["workloadRules"] + RULES["leaseRules"])
    kubeconfig = cluster.service_account_kubeconfig(namespace, "operator", tmp_path)
    arguments = ("--namespace", namespace, "--lease-namespace", namespace)
    with operator_replica(kubeconfig, tmp_path / "log", *arguments) as operator:
        stages = [kubelet.selection for kubelet in kubelets]
        create_model(cluster.api, namespace, "tiny", {"tolerations": [TOLERATION]}, stages=stages)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        kubelets[1].end()
        first = cluster.api.get("Pod", "tiny-0-1-0", namespace)
        assert first is not None
        words = TerminationMessage(failure_class=FailureClass.PEER_LOST, stage=0, peer=1, detail="stage 1 is silent")
        kubelets[0].end_container(first, 71, words.model_dump_json())

        def replaced() -> bool:
            return cluster.api.get("Pod", "tiny-0-2-1", namespace) is not None

        wait_until(
            "the next incarnation has pods", replaced, SOON_SECONDS, lambda: to_json(status_of(cluster, namespace))
        )
        assert cluster.api.get("Pod", "tiny-0-1-1", namespace) is None
        (failure,) = status_of(cluster, namespace)["lastFailures"]
        assert (failure["failureClass"], failure["stage"], failure["incarnation"]) == ("NodeLost", 1, 1)
        assert f"node {kubelets[1].name} is lost; stage 0 noticed: stage 1 is silent" in failure["message"]


def test_a_spent_budget_stays_spent_until_a_person_says_otherwise(
    cluster: Cluster, namespace: str, kubelets: list[InstantKubelet], tmp_path: Path
) -> None:
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        create_model(cluster.api, namespace, "tiny", kubelets[0].template, restart={"maxRestarts": 0})
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        first = cluster.api.get("Pod", "tiny-0-1-0", namespace)
        assert first is not None
        kubelets[0].end_container(first, 66, "out of device memory")
        where = ("plm/tiny", "-n", namespace)
        cluster.kubectl_ok("wait", "--for=condition=Degraded", *where, f"--timeout={SOON_SECONDS:g}s")
        degraded = condition_of(cluster.api.get("PipelineModel", "tiny", namespace), "Degraded")
        assert degraded["reason"] == "RestartBudgetSpent", degraded
        assert "out of device memory" in degraded["message"], degraded
        cluster.kubectl_ok("annotate", *where, "unrelated=annotation")
        wait_until("its pods are gone", lambda: not cluster.api.list("Pod", namespace), SOON_SECONDS, operator.log)
        assert status_of(cluster, namespace)["groups"][0]["phase"] == "Failed"
        # What an autoscaler does.
        cluster.kubectl_ok("scale", *where, "--replicas=2")

        def phases() -> list[str]:
            return [group["phase"] for group in status_of(cluster, namespace)["groups"]]

        wait_until("another group serves", lambda: phases()[1:] == ["Ready"], SOON_SECONDS, operator.log)
        assert phases() == ["Failed", "Ready"]
        cluster.kubectl_ok("annotate", *where, "stageline.dev/restart=now")
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        assert status_of(cluster, namespace)["groups"][0]["incarnation"] == 2
        assert condition_of(cluster.api.get("PipelineModel", "tiny", namespace), "Degraded")["status"] == "False"


def test_two_models_that_hold_half_of_the_nodes_each_both_serve_in_the_end(
    cluster: Cluster, namespace: str, kubelets: list[InstantKubelet], tmp_path: Path
) -> None:
    """Each holds the node that the other's second stage needs, and the scheduler alone would leave it so for ever."""
    left, right = kubelets
    closed_left, closed_right = (
        {"nodeSelector": {**each.selection["nodeSelector"], "open": "yes"}} for each in kubelets
    )
    template = {"tolerations": [TOLERATION]}
    # Long enough that one does not give up before a busy machine has placed the other.
    rules: dict[str, Any] = {"timeouts": {"schedulingSeconds": 15}, "restart": {"maxRestarts": 0}}
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        # Each node is closed at first to the model whose second stage belongs there, so that neither can get both.
        for name, first, second in (("a", left, closed_right), ("b", right, closed_left)):
            create_model(
                cluster.api, namespace, name, template, stages=[first.selection | SLOT, second | SLOT], **rules
            )

        def holds(name: str) -> bool:
            # Of whatever attempt: on a slow machine one may have given up before the other came.
            pods = cluster.api.list("Pod", namespace, {labels.MODEL: name, labels.STAGE: "0"})
            return any(pod["spec"].get("nodeName") for pod in pods)

        wait_until("each holds half", lambda: holds("a") and holds("b"), LATE_SECONDS, operator.log)
        cluster.kubectl_ok("label", "node", left.name, right.name, "open=yes")

        def ready() -> list[str]:
            return [name for name in ("a", "b") if is_ready(cluster, namespace, name)]

        (winner,) = wait_until("one of them serves", ready, LATE_SECONDS, operator.log)
        cluster.api.delete("PipelineModel", winner, namespace)
        (loser,) = {"a", "b"} - {winner}
        wait_ready(cluster.api, namespace, loser, LATE_SECONDS, operator.log)
        assert condition_of(cluster.api.get("PipelineModel", loser, namespace), "Degraded")["status"] == "False"
