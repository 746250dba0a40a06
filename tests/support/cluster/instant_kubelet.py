"""A kubelet that runs nothing: pods bound to its node are ready as soon as it sees them, and gone when told to go.

For tests of what the operator reads and writes, where no process is needed. The node is tainted, so that only pods
that ask for it come.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
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
from stageline_api import labels

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
        self.engine_addresses: dict[str, str] = {}
        """The address of every stage 0, by namespace: a pod that replaces another gets it too."""
        self._client = client
        amounts = {"pods": "1000", "cpu": "1000", "memory": "1Ti", **capacity}
        self._identity = NodeIdentity(self.name, amounts, {_LABEL: self.name})
        self._ended = threading.Event()
        loops = ((self._beat, _BEAT_SECONDS), (self._serve, _POLL_SECONDS))
        # A slow answer about pods must not make the node look lost.
        self._threads = [
            threading.Thread(target=self._repeat, args=loop, name=self.name, daemon=True) for loop in loops
        ]
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
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Fall silent: nothing is told any more when this returns. The node is deleted by whoever made it."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=_END_SECONDS)
            assert not thread.is_alive(), f"{self.name} hangs"

    def _repeat(self, step: Callable[[], None], period_seconds: float) -> None:
        while not self._ended.wait(period_seconds):
            try:
                step()
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
        path = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
        lease = lease_manifest(self._identity, now)
        self._patch(f"{path}/{self.name}", lease, "application/apply-patch+yaml", fieldManager="instant", force="true")
        status = {"status": node_status(self._identity, now)}
        self._patch(f"/api/v1/nodes/{self.name}/status", status, "application/strategic-merge-patch+json")

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
        """Once; again when its address changed, or a controller called the pod not ready after its node was silent."""
        uid = pod["metadata"]["uid"]
        with self._telling:
            known = self._known.get(uid)
            is_current = _is_ready(pod) and self._address_of(pod) in ("", pod["status"].get("podIP"))
            if (known is None and not self.holds) or (known == "ready" and not is_current):
                self._report(pod, "Running", {"running": {}}, ready=True)
                self._known[uid] = "ready"

    def _report(self, pod: dict[str, Any], phase: str, state: dict[str, Any], ready: bool) -> None:
        containers = [
            {"name": each["name"], "ready": ready, "state": state, "image": "", "imageID": "", "restartCount": 0}
            for each in pod["spec"]["containers"]
        ]
        conditions = [{"type": kind, "status": str(ready)} for kind in ("ContainersReady", "Ready")]
        status: dict[str, Any] = {"phase": phase, "conditions": conditions, "containerStatuses": containers}
        if address := self._address_of(pod):
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        self._patch(f"{_path(pod)}/status", {"status": status}, "application/strategic-merge-patch+json")

    def _address_of(self, pod: dict[str, Any]) -> str:
        """Empty where the test gave none."""
        is_engine = pod["metadata"].get("labels", {}).get(labels.STAGE) == "0"
        return self.engine_addresses.get(pod["metadata"]["namespace"], "") if is_engine else ""

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
