"""A served namespace that goes, and a right that is taken away, hinder nothing else: not a leader, not a standby."""

import signal
from pathlib import Path

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import RULES, OperatorReplica, create_model, grant, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json

SOON_SECONDS = 180.0


def make_namespace(cluster: Cluster, name: str) -> None:
    cluster.kubectl_ok("create", "namespace", name)
    cluster.kubectl_ok("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=120s")


def grant_in(cluster: Cluster, namespace: str, account_in: str) -> None:
    """The chart's rules in one namespace, for the account of another."""
    group = "rbac.authorization.k8s.io"
    rules = RULES["workloadRules"] + RULES["leaseRules"]
    metadata = {"name": "operator", "namespace": namespace}
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": account_in}
    cluster.apply(
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "operator"},
            "subjects": [subject],
        },
    )


def heals(cluster: Cluster, namespace: str, name: str, incarnation: int, operator: OperatorReplica) -> None:
    """A pod that goes is missed, and its group made again."""
    cluster.api.delete("Pod", f"{name}-0-{incarnation}-1", namespace, grace_seconds=0)

    def is_back() -> bool:
        groups = ((cluster.api.get("PipelineModel", name, namespace) or {}).get("status") or {}).get("groups", [])
        return [(each["incarnation"], each["phase"]) for each in groups] == [(incarnation + 1, "Ready")]

    def shown() -> str:
        return f"{to_json(cluster.api.get('PipelineModel', name, namespace))[-4000:]}\n{operator.log()}"

    wait_until(f"{name} heals", is_back, SOON_SECONDS, shown)


def test_leader_standby_and_newcomer_serve_the_others_when_a_served_namespace_is_deleted(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    gone = f"{namespace[-40:]}-gone".strip("-")
    make_namespace(cluster, gone)
    cluster.kubectl_ok("create", "serviceaccount", "operator", "-n", namespace)
    for each in (namespace, gone):
        grant_in(cluster, each, namespace)
    grant(cluster, namespace, "ClusterRole", f"nodes-{namespace}", RULES["nodeRules"])
    account = cluster.service_account_kubeconfig(namespace, "operator", tmp_path)
    arguments = ("--namespace", f"{gone},{namespace}", "--lease-namespace", namespace, "--relist-seconds", "5")
    with (
        operator_replica(account, tmp_path / "log1", *arguments) as leader,
        operator_replica(account, tmp_path / "log2", *arguments) as standby,
    ):
        wait_until("one leads", lambda: leader.leads or standby.leads, SOON_SECONDS, leader.log)
        if standby.leads:
            leader, standby = standby, leader
        create_model(cluster.api, namespace, "first", kubelet.template)
        create_model(cluster.api, gone, "other", kubelet.template)
        for where, name in ((namespace, "first"), (gone, "other")):
            wait_ready(cluster.api, where, name, SOON_SECONDS, leader.log)
        cluster.kubectl_ok("delete", "namespace", gone, "--timeout=90s")
        # The role for nodes goes as well: it can't be listed and hinders nothing either.
        cluster.kubectl_ok("delete", "clusterrolebinding", f"nodes-{namespace}")
        for replica in (leader, standby):

            def leaves_out(replica: OperatorReplica = replica) -> bool:
                left_out = replica.samples("stageline_operator_unreadable")
                return {(gone, "pods"), (gone, "pipelinemodels"), ("", "nodes")} <= left_out.keys()

            def is_ready(replica: OperatorReplica = replica) -> bool:
                return replica.get("/readyz").is_success

            wait_until("what can't be read is left out", leaves_out, SOON_SECONDS, replica.log)
            wait_until("it is ready", is_ready, SOON_SECONDS, replica.log)
            known = replica.samples("stageline_operator_model_info")
            assert [key for key in known if gone in key] == [], known
        heals(cluster, namespace, "first", 1, leader)
        leader.end(signal.SIGKILL)
        wait_until("the standby leads", lambda: standby.leads, SOON_SECONDS, standby.log)
        heals(cluster, namespace, "first", 2, standby)
        standby.end(signal.SIGKILL)
    with operator_replica(account, tmp_path / "log3", *arguments) as newcomer:
        heals(cluster, namespace, "first", 3, newcomer)
        make_namespace(cluster, gone)
        grant_in(cluster, gone, namespace)
        create_model(cluster.api, gone, "again", kubelet.template)
        wait_ready(cluster.api, gone, "again", SOON_SECONDS, newcomer.log)
        assert newcomer.get("/readyz").is_success, newcomer.log()
    cluster.kubectl("delete", "namespace", gone, "--wait=false")
    cluster.kubectl("delete", "clusterrole", f"nodes-{namespace}")
