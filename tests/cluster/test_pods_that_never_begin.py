"""Sidecars that restart, pods that a node refuses, and stages that start late, as a real API server keeps them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.under_test import Cluster, to_json
from stageline_api import labels
from stageline_api.failures import FailureClass, TerminationMessage

SOON_SECONDS = 180.0
NO_RESTART: dict[str, Any] = {"restart": {"maxRestarts": 0}}


def pods_of(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    found = cluster.api.list("Pod", namespace, {labels.MODEL: "tiny"})
    return {each["metadata"]["name"]: each for each in found}


def uids_of(cluster: Cluster, namespace: str) -> dict[str, str]:
    return {name: each["metadata"]["uid"] for name, each in pods_of(cluster, namespace).items()}


def status_of(cluster: Cluster, namespace: str) -> dict[str, Any]:
    model = cluster.api.get("PipelineModel", "tiny", namespace)
    return dict((model or {}).get("status") or {})


def tell(cluster: Cluster, namespace: str, name: str, **status: Any) -> None:
    """Write a pod's status as its kubelet would."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
    headers = {"Content-Type": "application/strategic-merge-patch+json"}
    with cluster.connect() as client:
        answer = client.patch(path, json={"status": status}, headers=headers)
    assert answer.is_success, answer.text


def container(name: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "ready": False, "image": "", "imageID": "", "restartCount": 0, "state": state, **more}


def test_a_native_sidecar_that_its_kubelet_restarts_ends_no_group(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    sidecar = {"name": "watcher", "image": "example.org/watcher", "restartPolicy": "Always"}
    template = kubelet.template | {"podTemplate": {"spec": {"initContainers": [sidecar]}}}
    with operator_replica(
        cluster.kubeconfig, tmp_path / "log", "--namespace", namespace, "--no-leader-elect"
    ) as operator:
        create_model(cluster.api, namespace, "tiny", template, **NO_RESTART)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        before = uids_of(cluster, namespace)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"terminated": {"exitCode": 1, "reason": "Error", "startedAt": now, "finishedAt": now}}
        tell(cluster, namespace, "tiny-0-1-1", initContainerStatuses=[container("watcher", ended)])
        # The second group's pods come by the same watch, after the sidecar's end: the operator has seen it by then.
        cluster.kubectl_ok("scale", "plm/tiny", "-n", namespace, "--replicas=2")
        wait_until(
            "the second group is there", lambda: len(pods_of(cluster, namespace)) == 4, SOON_SECONDS, operator.log
        )
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        after = uids_of(cluster, namespace)
        assert {name: after.get(name) for name in before} == before, to_json(status_of(cluster, namespace))
        assert status_of(cluster, namespace).get("lastFailures", []) == []


def test_a_pod_that_its_kubelet_refuses_uses_up_no_restart_and_the_next_one_may_be_taken(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    message = "Pod was rejected: Resources cannot be allocated with Topology locality"
    with operator_replica(
        cluster.kubeconfig, tmp_path / "log", "--namespace", namespace, "--no-leader-elect"
    ) as operator:
        kubelet.holds = True
        create_model(cluster.api, namespace, "tiny", kubelet.template, **NO_RESTART)
        wait_until("both pods are there", lambda: len(pods_of(cluster, namespace)) == 2, SOON_SECONDS, operator.log)
        tell(cluster, namespace, "tiny-0-1-1", phase="Failed", reason="TopologyAffinityError", message=message)

        def is_on_record() -> bool:
            return bool(status_of(cluster, namespace).get("lastFailures"))

        wait_until("the refusal is on record", is_on_record, SOON_SECONDS, operator.log)
        failure = status_of(cluster, namespace)["lastFailures"][0]
        assert (failure["failureClass"], failure["stage"], failure["reason"]) == (
            "Unschedulable",
            1,
            "TopologyAffinityError",
        )
        assert message in failure["message"]
        kubelet.holds = False
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        group = status_of(cluster, namespace)["groups"][0]
        assert (group["incarnation"], group.get("restarts", [])) == (2, []), to_json(group)


def test_a_stage_that_starts_late_keeps_its_pod_and_the_others_are_made_again(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    late = TerminationMessage(failure_class=FailureClass.RENDEZVOUS_TIMEOUT, peer=1, detail="stage 1 is not there")
    with operator_replica(
        cluster.kubeconfig, tmp_path / "log", "--namespace", namespace, "--no-leader-elect"
    ) as operator:
        kubelet.holds = True
        create_model(cluster.api, namespace, "tiny", kubelet.template, **NO_RESTART)
        wait_until("both pods are there", lambda: len(pods_of(cluster, namespace)) == 2, SOON_SECONDS, operator.log)
        before = uids_of(cluster, namespace)
        preparing = container("prepare", {"running": {}})
        waiting = container("stage", {"waiting": {"reason": "PodInitializing"}})
        tell(
            cluster,
            namespace,
            "tiny-0-1-1",
            phase="Pending",
            initContainerStatuses=[preparing],
            containerStatuses=[waiting],
        )
        first = cluster.api.get("Pod", "tiny-0-1-0", namespace)
        assert first is not None
        kubelet.end_container(first, 70, late.model_dump_json())

        def is_made_again() -> bool:
            return uids_of(cluster, namespace).get("tiny-0-1-0") not in (None, before["tiny-0-1-0"])

        wait_until("stage 0 is made again", is_made_again, SOON_SECONDS, operator.log)
        assert uids_of(cluster, namespace).get("tiny-0-1-1") == before["tiny-0-1-1"]
        failure = status_of(cluster, namespace)["lastFailures"][0]
        assert (failure["failureClass"], failure["stage"]) == ("NotStarted", 1)
        assert "init container prepare runs" in failure["message"]
        kubelet.holds = False
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        group = status_of(cluster, namespace)["groups"][0]
        assert (group["incarnation"], group.get("restarts", [])) == (1, []), to_json(group)
