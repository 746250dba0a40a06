"""What the node agent makes of a pod from an API server, and of a status for it: the pure parts."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.kubelet.api_access import read_kubeconfig
from cluster.kubelet.local_form import add_account, local_form, referenced_objects
from cluster.kubelet.reported_status import lost_patch, status_patch
from cluster.node_pods import pod_of, python_container
from stageline_api.errors import UserError
from stageline_local.node.pod_fields import UnsupportedPodFieldError, check_pod
from stageline_local.node.pod_runner import restart_wait_seconds

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN_MOUNT = {"name": "kube-api-access-x1", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}


def as_an_api_server_holds_it(**spec: Any) -> dict[str, Any]:
    """A pod with the fields that admission and scheduling add."""
    added: dict[str, Any] = {
        "nodeName": "node-a",
        "schedulerName": "default-scheduler",
        "dnsPolicy": "ClusterFirst",
        "priority": 0,
        "preemptionPolicy": "PreemptLowerPriority",
        "serviceAccountName": "default",
        "serviceAccount": "default",
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
        "nodeSelector": {"gpu": "yes"},
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
    }
    pod = pod_of(python_container("pass"), **added | spec)
    pod["metadata"]["uid"] = "u-1"
    return pod


def test_what_the_cluster_has_seen_to_is_no_longer_asked_of_the_node() -> None:
    pod = as_an_api_server_holds_it()
    with pytest.raises(UnsupportedPodFieldError):
        check_pod(pod)
    local = local_form(pod)
    check_pod(local.manifest)
    assert local.service_account is None


@pytest.mark.parametrize(
    ("spec", "field"),
    [({"dnsPolicy": "Default"}, "spec.dnsPolicy"), ({"hostNetwork": True}, "spec.hostNetwork")],
)
def test_what_the_node_cannot_do_is_still_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedPodFieldError, match=field):
        check_pod(local_form(as_an_api_server_holds_it(**spec)).manifest)


def test_devices_are_counted_by_the_scheduler_and_not_given() -> None:
    amounts = {"limits": {"nvidia.com/gpu": "1", "memory": "1Gi"}, "requests": {"nvidia.com/gpu": "1"}}
    pod = as_an_api_server_holds_it(containers=[python_container("pass", resources=amounts)])
    (container,) = local_form(pod).manifest["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "1Gi"}, "requests": {}}


def test_a_token_volume_becomes_a_kubeconfig(tmp_path: Path) -> None:
    volume = {"name": "kube-api-access-x1", "projected": {"defaultMode": 420, "sources": []}}
    container = python_container("pass", volumeMounts=[TOKEN_MOUNT])
    pod = as_an_api_server_holds_it(
        automountServiceAccountToken=True, serviceAccountName="operator", containers=[container], volumes=[volume]
    )
    local = local_form(pod)
    assert local.service_account == "operator"
    add_account(local.manifest, tmp_path)
    check_pod(local.manifest)
    (container,) = local.manifest["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = local.manifest["spec"]["volumes"]
    assert volume["hostPath"]["path"] == str(tmp_path)
    assert container["env"][0]["value"] == f"{mounts[volume['name']]}/kubeconfig"


def test_every_object_that_a_container_needs_is_known_beforehand() -> None:
    environment = [
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ]
    pod = pod_of(
        python_container("pass"),
        initContainers=[python_container("pass", name="first", env=environment)],
        volumes=[{"name": "v", "configMap": {"name": "m"}}],
    )
    assert referenced_objects(pod) == {("Secret", "s"), ("ConfigMap", "c"), ("ConfigMap", "m")}


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2025-12-31T00:00:00Z"}
    pod = {"metadata": {"uid": "u-1"}, "status": {"conditions": [ready]}}

    def _times(ready_status: str) -> list[str]:
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready_status}]
        patch = status_patch(pod, {"conditions": conditions}, "127.0.0.1", NOW)
        assert [each["type"] for each in patch["status"]["conditions"]] == ["Ready"]
        return [each["lastTransitionTime"] for each in patch["status"]["conditions"]]

    assert _times("True") == ["2025-12-31T00:00:00Z"]
    assert _times("False") == ["2026-01-01T00:00:00.000000Z"]


def test_containers_that_ended_before_the_node_did_keep_their_own_end() -> None:
    ended = {"name": "a", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
    ran = {"name": "b", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "ready": True}
    patch = lost_patch({"metadata": {"uid": "u-1"}, "status": {"containerStatuses": [ended, ran]}}, NOW)
    first, second = patch["status"]["containerStatuses"]
    assert first == ended
    assert second["state"]["terminated"]["reason"] == "ContainerStatusUnknown"
    assert second["ready"] is False


def test_restarts_wait_ever_longer_up_to_five_minutes() -> None:
    assert [restart_wait_seconds(count) for count in (1, 2, 3, 4, 7, 8, 50)] == [0, 10, 20, 40, 300, 300, 300]


def test_a_kubeconfig_that_would_need_a_plugin_is_refused_by_the_fields_name(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(
        "current-context: a\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'https://127.0.0.1:1'}}]\n"
        "users: [{name: a, user: {exec: {command: aws}}}]\n"
    )
    with pytest.raises(UserError, match=r"users\[\]\.user\.exec"):
        read_kubeconfig(file)
    file.write_text("current-context: b\ncontexts: []\n")
    with pytest.raises(UserError, match="contexts entry 'b'"):
        read_kubeconfig(file)
