"""A kubelet that runs nothing: pods bound to its node are ready as soon as it sees them, and gone when told to go.

For tests of what the operator reads and writes, where no process is needed. The node is tainted, so that only pods
that ask for it come.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from cluster.api import wait_until
from cluster.kubelet.node_objects import (
    LEASE_NAMESPACE,
    NodeIdentity,
    lease_manifest,
    node_manifest,
    node_status,
)

_POLL_SECONDS: Final = 0.1
_BEAT_SECONDS: Final = 2.0
_END_SECONDS: Final = 90.0
"""Longer than the client waits for the answers of one round."""
_LABEL: Final = "stageline.dev/test-node"
TOLERATION: Final = {"key": _LABEL, "operator": "Exists", "effect": "NoSchedule"}


class ApiServerAwayError(Exception):
    """The API server has begun or is about to end, or has too much to do."""


class InstantKubelet:
    """One node. `holds` keeps new pods from getting ready."""

    def __init__(self, client: httpx.Client, capacity: Mapping[str, str]) -> None:
        self.name = f"instant-{uuid.uuid4().hex[:6]}"
        self.holds = False
        self._client = client
        amounts = {"pods": "1000", "cpu": "1000", "memory": "1Ti", **capacity}
        self._identity = NodeIdentity(self.name, amounts, {_LABEL: self.name})
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._beat_at = 0.0
        self._known: dict[str, str] = {}
        """By uid: whether the pod is `ready` or its container has `ended`."""
        self._telling = threading.Lock()
        """Held while a status is decided on and sent, so that none overtakes a later one."""

    @property
    def template(self) -> dict[str, Any]:
        """`spec.template` of PipelineModels whose pods come here."""
        return {**self.selection, "tolerations": [TOLERATION]}

    @property
    def selection(self) -> dict[str, Any]:
        """The part of it that names this node."""
        return {"nodeSelector": {_LABEL: self.name}}

    def end_container(self, pod: dict[str, Any], exit_code: int, message: str = "") -> None:
        """The stage container ends."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"exitCode": exit_code, "reason": "Error", "message": message, "startedAt": now, "finishedAt": now}
        with self._telling:
            self._known[pod["metadata"]["uid"]] = "ended"
            self._report(pod, "Failed", {"terminated": ended}, ready=False)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def end(self) -> None:
        """Fall silent: nothing is told any more when this returns. The node is deleted by whoever made it."""
        self._ended.set()
        self._thread.join(timeout=_END_SECONDS)
        assert not self._thread.is_alive(), f"{self.name} hangs"

    def _run(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                self._beat()
                self._serve()
            except (httpx.TransportError, ApiServerAwayError):
                continue  # what was not told is told in the next round

    def register(self) -> None:
        """Make the node, and wait until pods may be bound to it."""
        manifest = node_manifest(self._identity, datetime.now(UTC))
        manifest["spec"]["taints"] = [{"key": _LABEL, "effect": "NoSchedule"}]
        assert self._client.post("/api/v1/nodes", json=manifest).is_success
        self._beat()

    def is_clear(self) -> bool:
        """Whether the control plane has taken its own taints off."""
        node = self._client.get(f"/api/v1/nodes/{self.name}").json()
        return [taint["key"] for taint in node["spec"].get("taints", [])] == [_LABEL]

    def remove(self) -> None:
        """Delete the node."""
        self._client.delete(f"/api/v1/nodes/{self.name}")

    def _beat(self) -> None:
        now = datetime.now(UTC)
        if now.timestamp() - self._beat_at < _BEAT_SECONDS:
            return
        path = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
        lease = lease_manifest(self._identity, now)
        self._patch(f"{path}/{self.name}", lease, "application/apply-patch+yaml", fieldManager="instant", force="true")
        status = {"status": node_status(self._identity, now)}
        self._patch(f"/api/v1/nodes/{self.name}/status", status, "application/strategic-merge-patch+json")
        self._beat_at = now.timestamp()

    def _serve(self) -> None:
        query = {"fieldSelector": f"spec.nodeName={self.name}", "resourceVersion": "0"}
        answer = self._client.get("/api/v1/pods", params=query)
        for pod in answer.json()["items"] if answer.is_success else ():
            if "deletionTimestamp" in pod["metadata"]:
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
                self._client.request("DELETE", _path(pod), json=options)
            else:
                self._make_ready(pod)

    def _make_ready(self, pod: dict[str, Any]) -> None:
        """Once; and again when a controller called the pod not ready, its node having been silent on a busy machine."""
        uid = pod["metadata"]["uid"]
        with self._telling:
            known = self._known.get(uid)
            if (known is None and not self.holds) or (known == "ready" and not _is_ready(pod)):
                self._report(pod, "Running", {"running": {}}, ready=True)
                self._known[uid] = "ready"

    def _report(self, pod: dict[str, Any], phase: str, state: dict[str, Any], ready: bool) -> None:
        containers = [
            {"name": each["name"], "ready": ready, "state": state, "image": "", "imageID": "", "restartCount": 0}
            for each in pod["spec"]["containers"]
        ]
        conditions = [{"type": kind, "status": str(ready)} for kind in ("ContainersReady", "Ready")]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": containers}
        self._patch(f"{_path(pod)}/status", {"status": status}, "application/strategic-merge-patch+json")

    def _patch(self, path: str, body: dict[str, Any], content_type: str, **query: str) -> None:
        headers = {"Content-Type": content_type}
        answer = self._client.patch(path, json=body, headers=headers, params=query)
        if answer.is_server_error or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise ApiServerAwayError(f"{path}: {answer.status_code} {answer.text}")
        assert answer.is_success or answer.status_code in (404, 409), f"{path}: {answer.status_code} {answer.text}"


@contextmanager
def instant_kubelet(client: httpx.Client, **capacity: str) -> Iterator[InstantKubelet]:
    """A node that lives as long as the block, with `capacity` besides plenty of everything usual."""
    kubelet = InstantKubelet(client, capacity)
    kubelet.register()
    kubelet.start()
    try:
        wait_until("the node may take pods", kubelet.is_clear, 120)
        yield kubelet
    finally:
        kubelet.end()
        kubelet.remove()


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
