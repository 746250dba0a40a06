"""A write that fails is one object's: other groups are healed, the model says why, and it goes on once it can."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.admission_webhook import DEAD, asks_before_pods_are_made, slow_webhook
from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import OperatorReplica, condition_of, create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json
from cluster.unreliable_proxy import ProxyRules, unreliable_proxy

SOON_SECONDS = 180.0


class Tiny:
    """The model `tiny` of a namespace."""

    def __init__(self, cluster: Cluster, namespace: str, operator: OperatorReplica) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._operator = operator

    def status(self) -> dict[str, Any]:
        return dict((self._cluster.api.get("PipelineModel", "tiny", self._namespace) or {}).get("status") or {})

    def ready(self) -> dict[str, Any]:
        return condition_of({"status": self.status()})

    def groups(self) -> dict[int, tuple[int, str]]:
        return {each["index"]: (each["incarnation"], each["phase"]) for each in self.status().get("groups", [])}

    def rows(self) -> list[dict[str, Any]]:
        return [row for group in self.status().get("groups", []) for row in group["stages"]]

    def shown(self) -> str:
        return f"{to_json(self.status())[-5000:]}\n{self._operator.log()}"

    def wait_ready(self) -> None:
        wait_ready(self._cluster.api, self._namespace, "tiny", SOON_SECONDS, self._operator.log)


@contextmanager
def volumes(cluster: Cluster, name: str, storage_class: str, count: int) -> Iterator[None]:
    """Volumes of a class that nobody else has."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": "/nowhere"},
        "storageClassName": storage_class,
        "persistentVolumeReclaimPolicy": "Retain",
    }
    names = [f"{name[-40:]}-{storage_class[-4:]}-{number}".strip("-") for number in range(count)]
    kind = {"apiVersion": "v1", "kind": "PersistentVolume"}
    cluster.apply(*({**kind, "metadata": {"name": each}, "spec": spec} for each in names))
    try:
        yield
    finally:
        cluster.kubectl("delete", "persistentvolume", *names, "--wait=false")


def caching(storage_class: str) -> dict[str, Any]:
    template = {"size": "1Gi", "storageClassName": storage_class}
    return {"model": {"source": "hf://org/name", "cache": {"claimTemplate": template}}}


def test_groups_heal_while_anothers_claim_is_refused_and_another_storage_class_is_rolled_out(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    slow, fast = f"{namespace[-40:]}-slow".strip("-"), f"{namespace[-40:]}-fast".strip("-")
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with (
        volumes(cluster, namespace, slow, 6),
        volumes(cluster, namespace, fast, 6),
        operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator,
    ):
        tiny = Tiny(cluster, namespace, operator)
        create_model(cluster.api, namespace, "tiny", kubelet.template, **caching(slow), restart={"backoffSeconds": 1})
        tiny.wait_ready()
        few = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": namespace}}
        cluster.apply(few | {"spec": {"hard": {"persistentvolumeclaims": "2"}}})

        def counted() -> bool:
            used = cluster.kubectl_ok("get", "quota", "few", "-n", namespace, "-o", "jsonpath={.status.used}")
            return '"persistentvolumeclaims":"2"' in used

        wait_until("the quota counts", counted, SOON_SECONDS)
        cluster.kubectl_ok("scale", "plm/tiny", "-n", namespace, "--replicas=2")
        refused = "exceeded quota: few"
        wait_until("it is said", lambda: refused in tiny.ready().get("message", ""), SOON_SECONDS, tiny.shown)
        cluster.api.delete("Pod", "tiny-0-1-1", namespace, grace_seconds=0)
        wait_until("group 0 heals", lambda: tiny.groups().get(0) == (2, "Ready"), SOON_SECONDS, tiny.shown)
        assert tiny.ready()["reason"] == "WriteRefused", tiny.shown()
        cluster.kubectl_ok("delete", "quota", "few", "-n", namespace)
        tiny.wait_ready()

        cluster.api.patch("PipelineModel", "tiny", {"spec": caching(fast)}, namespace)

        def rolled_out() -> bool:
            found = cluster.api.list("PersistentVolumeClaim", namespace)
            used = {each["metadata"]["name"] for each in found if each["spec"]["storageClassName"] == fast}
            names = {f"tiny-cache-{group}-{stage}" for group in tiny.groups() for stage in range(2)}
            status = tiny.status()
            is_ready = condition_of({"status": status}).get("status") == "True"
            return is_ready and status.get("updatedReplicas") == 2 and names <= used

        wait_until("it is rolled out", rolled_out, SOON_SECONDS, tiny.shown)


def test_a_dead_webhook_is_said_on_the_model_and_a_slow_one_is_waited_for(
    cluster: Cluster, control_plane: ControlPlane, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    arguments = ("--namespace", namespace, "--lease-namespace", namespace)
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        tiny = Tiny(cluster, namespace, operator)
        with asks_before_pods_are_made(cluster, namespace, DEAD):
            create_model(cluster.api, namespace, "tiny", kubelet.template)

            def row() -> bool:
                words = [(each.get("reason"), each.get("message", "")) for each in tiny.rows()]
                return any(reason == "PodRefused" and "failed calling webhook" in said for reason, said in words)

            def event() -> bool:
                events = cluster.api.list("Event", namespace)
                return any(each["reason"] == "PodRefused" and "webhook" in each["message"] for each in events)

            wait_until("the stage's row says it", row, SOON_SECONDS, tiny.shown)
            wait_until("an Event says it", event, SOON_SECONDS, tiny.shown)
            assert "failed calling webhook" in tiny.ready()["message"], tiny.shown()
        # Longer than a lease may go without renewal.
        with slow_webhook(control_plane, 7.0) as slow, asks_before_pods_are_made(cluster, namespace, slow):
            tiny.wait_ready()
        assert operator.leads, operator.log()
        assert "no longer leading" not in operator.log()


def test_throttled_events_hold_up_nothing_else(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    throttled: list[float] = []
    written: list[float] = []

    def refuse(method: str, path: str) -> int:
        if method == "GET":
            return 0
        is_event = "/events" in path
        (throttled if is_event else written).append(time.monotonic())
        return 429 if is_event else 0

    rules = ProxyRules(refuse=refuse, retry_after_seconds=4)
    arguments = ("--namespace", namespace, "--no-leader-elect")
    with (
        unreliable_proxy(cluster.kubeconfig, rules, tmp_path) as kubeconfig,
        operator_replica(kubeconfig, tmp_path / "log", *arguments) as operator,
    ):
        tiny = Tiny(cluster, namespace, operator)
        create_model(cluster.api, namespace, "tiny", kubelet.template)
        tiny.wait_ready()
        wait_until("an Event is throttled", lambda: throttled, SOON_SECONDS, operator.log)
        cluster.api.delete("Pod", "tiny-0-1-1", namespace, grace_seconds=0)
        wait_until("it heals", lambda: tiny.groups().get(0) == (2, "Ready"), SOON_SECONDS, tiny.shown)
        # What was under way when an Event was refused may arrive a moment later.
        during = [at for at in written if any(begin + 0.5 < at < begin + 4.0 for begin in throttled)]
        assert during, (throttled, written)
