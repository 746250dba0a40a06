"""Replicas of the operator: one acts, another takes over within 15 s, and the chart's role is all they need."""

import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import RULES, OperatorReplica, create_model, grant, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json
from stageline_operator.controller.settings import LeaseTimes

SOON_SECONDS = 180.0
TAKEOVER_SECONDS = 15.0


@pytest.fixture
def replicas(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[list[OperatorReplica]]:
    """Two replicas, of which the first leads."""
    arguments = ("--namespace", namespace, "--lease-namespace", namespace)
    with operator_replica(cluster.kubeconfig, tmp_path / "first", *arguments) as first:
        wait_until("the first leads", lambda: first.leads, SOON_SECONDS, first.log)
        with operator_replica(cluster.kubeconfig, tmp_path / "second", *arguments) as second:
            wait_until("the second has seen all", lambda: second.get("/readyz").is_success, SOON_SECONDS, second.log)
            assert not second.leads
            yield [first, second]


def lease(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found = cluster.api.get("Lease", "stageline-operator", namespace)
    assert found is not None
    return dict(found["spec"])


def looks_at_the_lease(replica: OperatorReplica) -> float:
    """How often it has read the lease."""
    requests = replica.samples("stageline_operator_api_requests_total")
    return sum(count for (_, resource, verb), count in requests.items() if (resource, verb) == ("leases", "get"))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_a_killed_leader_is_replaced_within_15_seconds(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, replicas: list[OperatorReplica]
) -> None:
    first, second = replicas
    wait_until("the second looks at the lease", lambda: looks_at_the_lease(second), SOON_SECONDS, second.log)
    first.end(signal.SIGKILL)
    # Not before: until its end the first may renew it for as long as it likes.
    looked = looks_at_the_lease(second)
    last = lease(cluster, namespace)
    wait_until("the second leads", lambda: second.leads, SOON_SECONDS, second.log)
    looked = looks_at_the_lease(second) - looked
    taken = lease(cluster, namespace)
    assert taken["holderIdentity"] != last["holderIdentity"]
    seconds = (moment(taken["acquireTime"]) - moment(last["renewTime"])).total_seconds()
    assert last["leaseDurationSeconds"] <= seconds
    # In looks, which come at an even pace: a busy machine delays them, but the second must not need more of them.
    assert looked * LeaseTimes().retry_seconds <= TAKEOVER_SECONDS
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, second.log)


def test_a_leader_told_to_stop_gives_the_lease_up_at_once(
    cluster: Cluster, namespace: str, replicas: list[OperatorReplica]
) -> None:
    first, second = replicas
    last = lease(cluster, namespace)
    assert first.end(signal.SIGTERM) == 0
    assert lease(cluster, namespace)["holderIdentity"] != last["holderIdentity"]
    wait_until("the second leads", lambda: second.leads, SOON_SECONDS, second.log)
    assert second.end(signal.SIGINT) == 0
    assert lease(cluster, namespace)["holderIdentity"] == ""


def test_a_leader_that_was_frozen_does_not_act_when_it_wakes(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, replicas: list[OperatorReplica]
) -> None:
    """Frozen as by a suspended machine, it still believes that it leads; its next write must not be sent."""
    first, second = replicas
    first.process.send_signal(signal.SIGSTOP)
    wait_until("the second leads", lambda: second.leads, SOON_SECONDS, second.log)
    create_model(cluster.api, namespace, "tiny", kubelet.template)
    first.process.send_signal(signal.SIGCONT)
    wait_until("the first knows", lambda: not first.leads, SOON_SECONDS, first.log)
    wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, second.log)
    writes = {labels for labels in first.samples("stageline_operator_api_requests_total") if labels[1] != "leases"}
    assert not [labels for labels in writes if labels[2] in ("create", "patch", "delete")], writes
    assert second.leads


@pytest.mark.parametrize("is_clusterwide", [True, False], ids=["cluster-wide", "one-namespace"])
def test_exactly_the_charts_rules_are_enough(
    cluster: Cluster,
    namespace: str,
    kubelet: InstantKubelet,
    tmp_path: Path,
    is_clusterwide: bool,
) -> None:
    """From creation over a failed group to deletion, nothing is forbidden but nodes to an operator of one namespace."""
    cluster.kubectl_ok("create", "serviceaccount", "operator", "-n", namespace)
    name = f"operator-{namespace}"
    grant(cluster, namespace, "Role", "operator-lease", RULES["leaseRules"])
    if is_clusterwide:
        grant(cluster, namespace, "ClusterRole", name, [*RULES["workloadRules"], *RULES["nodeRules"]])
    else:
        grant(cluster, namespace, "Role", "operator", RULES["workloadRules"])
    kubeconfig = cluster.service_account_kubeconfig(namespace, "operator", tmp_path)
    where = () if is_clusterwide else ("--namespace", namespace)
    try:
        with operator_replica(kubeconfig, tmp_path / "log", "--lease-namespace", namespace, *where) as operator:
            create_model(cluster.api, namespace, "tiny", kubelet.template)
            wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
            failed = cluster.api.get("Pod", "tiny-0-1-0", namespace)
            assert failed is not None
            kubelet.end_container(failed, 71, "peer lost")

            def incarnation() -> int:
                model = cluster.api.get("PipelineModel", "tiny", namespace)
                return int(model["status"]["groups"][0]["incarnation"]) if model else 0

            wait_until("it is replaced", lambda: incarnation() == 2, SOON_SECONDS, operator.log)
            wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
            requests = operator.samples("stageline_operator_api_requests_total")
            if not is_clusterwide:
                assert {labels for labels in requests if labels[0] == "403"} == {("403", "nodes", "list")}
            # Namespaces of other tests are going meanwhile, and nothing may be made in those.
            refused = [line for line in operator.lines() if "403 Forbidden" in line["message"]]
            assert not refused, to_json(refused)
    finally:
        cluster.kubectl_ok("delete", "clusterrolebinding,clusterrole", name, "--ignore-not-found")
