"""The control plane does what a cluster does: permissions, pod security, ServiceAccounts, owners, a restart."""

import subprocess
from pathlib import Path
from typing import Any

import httpx

from cluster.api import wait_until
from cluster.api_server_outage import api_server_outage
from cluster.control_plane import ControlPlane
from cluster.under_test import Cluster

SOON_SECONDS = 180.0
"""The garbage collector pauses for half a minute and more while it learns of new kinds."""


def pod(name: str, **security: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "command": ["true"], "securityContext": security}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


def test_a_service_account_may_do_nothing_it_was_not_given(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    kubeconfig = cluster.service_account_kubeconfig(namespace, "default", tmp_path)
    done = subprocess.run(
        [cluster.kubectl_command, "--kubeconfig", str(kubeconfig), "get", "pods", "-n", namespace],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode != 0
    assert f'User "system:serviceaccount:{namespace}:default" cannot list resource "pods"' in done.stderr


def test_pod_security_is_enforced_where_a_namespace_asks_for_it(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl_ok("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def answer() -> httpx.Response:
        return cluster.api.create("Pod", pod("root"), namespace, dry_run=True)

    # Admission reads labels from a watch.
    wait_until("it is refused", lambda: answer().status_code == 403, SOON_SECONDS, lambda: answer().text)
    assert 'violates PodSecurity "restricted:latest"' in answer().json()["message"]


def test_what_belongs_to_a_deleted_owner_goes_too(cluster: Cluster, namespace: str) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    uid = cluster.api.create("ConfigMap", owner, namespace).json()["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    owned = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [reference]}}
    assert cluster.api.create("ConfigMap", owned, namespace).status_code == 201
    cluster.api.delete("ConfigMap", "owner", namespace)
    wait_until(
        "the owned object is gone", lambda: cluster.api.get("ConfigMap", "owned", namespace) is None, SOON_SECONDS
    )


def test_the_api_server_comes_back_with_what_it_held(
    control_plane: ControlPlane, cluster: Cluster, namespace: str
) -> None:
    kept = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"a": "b"}}
    assert cluster.api.create("ConfigMap", kept, namespace).status_code == 201
    with api_server_outage(control_plane):
        pass
    found = cluster.api.get("ConfigMap", "kept", namespace)
    assert found is not None
    assert found["data"] == {"a": "b"}
