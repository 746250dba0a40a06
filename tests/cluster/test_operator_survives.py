"""The operator when the API server throttles, is away, or tells half: it waits, and is right again in the end."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.api_server_outage import api_server_outage
from cluster.control_plane import ControlPlane
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json
from cluster.unreliable_proxy import ProxyRules, unreliable_proxy

SOON_SECONDS = 180.0
LABEL = {"stageline.dev/model": "tiny"}


def pod_names(cluster: Cluster, namespace: str) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in cluster.api.list("Pod", namespace, LABEL))


def test_throttled_and_failing_requests_are_tried_again_and_nothing_is_made_twice(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    """Every third request is refused, by turns with 429, 500 and 503."""
    count = itertools.count()
    statuses = itertools.cycle((429, 500, 503))
    rules = ProxyRules(refuse=lambda _method, _path: next(statuses) if next(count) % 3 == 2 else 0)
    arguments = ("--namespace", namespace, "--lease-namespace", namespace, "--relist-seconds", "5")
    with (
        unreliable_proxy(cluster.kubeconfig, rules, tmp_path) as kubeconfig,
        operator_replica(kubeconfig, tmp_path / "log", *arguments) as operator,
    ):
        create_model(cluster.api, namespace, "tiny", kubelet.template, replicas=3)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        assert len(rules.refused) > 5, rules.refused
        wanted = [f"tiny-{group}-1-{stage}" for group in range(3) for stage in range(2)]
        assert pod_names(cluster, namespace) == wanted
        assert operator.process.poll() is None
        unexpected = [line for line in operator.lines() if "exception" in line]
        assert not unexpected, to_json(unexpected)


def test_a_deletion_that_the_watch_never_told_of_is_found_by_listing(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    """Without it a dead group would count as ready for ever: the ghost that long-lived watches leave."""

    def hides(event: Mapping[str, Any]) -> bool:
        seen = event["object"]
        is_going = event["type"] == "DELETED" or "deletionTimestamp" in seen.get("metadata", {})
        return bool(seen.get("kind") == "Pod" and is_going)

    rules = ProxyRules(hides=hides)
    arguments = ("--namespace", namespace, "--no-leader-elect", "--relist-seconds", "5")
    with (
        unreliable_proxy(cluster.kubeconfig, rules, tmp_path) as kubeconfig,
        operator_replica(kubeconfig, tmp_path / "log", *arguments) as operator,
    ):
        create_model(cluster.api, namespace, "tiny", kubelet.template)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        cluster.api.delete("Pod", "tiny-0-1-1", namespace, grace_seconds=0)
        replaced = ["tiny-0-2-0", "tiny-0-2-1"]
        wait_until("it is replaced", lambda: pod_names(cluster, namespace) == replaced, SOON_SECONDS, operator.log)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        corrections = operator.samples("stageline_operator_relist_corrections_total")
        assert sum(corrections.values()) >= 1, corrections


def test_an_api_server_that_goes_away_and_comes_back_finds_the_operator_at_work(
    cluster: Cluster, control_plane: ControlPlane, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    arguments = ("--namespace", namespace, "--lease-namespace", namespace)
    with operator_replica(cluster.kubeconfig, tmp_path / "log", *arguments) as operator:
        create_model(cluster.api, namespace, "before", kubelet.template)
        wait_ready(cluster.api, namespace, "before", SOON_SECONDS, operator.log)
        with api_server_outage(control_plane):
            # It must not act on a lease that it can't renew, nor end, nor say that it is sick.
            wait_until("it stops leading", lambda: not operator.leads, SOON_SECONDS, operator.log)
            assert operator.get("/healthz").status_code == 200
        create_model(cluster.api, namespace, "after", kubelet.template)
        wait_ready(cluster.api, namespace, "after", SOON_SECONDS, operator.log)
        before = cluster.api.get("PipelineModel", "before", namespace)
        assert before is not None
        assert before["status"]["groups"][0]["incarnation"] == 1, "an outage is no reason to restart a group"
        assert operator.process.poll() is None
