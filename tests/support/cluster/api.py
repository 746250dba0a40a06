"""What cluster tests ask an API server, and waiting for it with a deadline.

Paths are built from kinds that the tests use; anything else goes through `kubectl`, as a person would do it.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import httpx

_GROUP_PATHS: Final = {
    "Pod": "api/v1",
    "Service": "api/v1",
    "ConfigMap": "api/v1",
    "Secret": "api/v1",
    "PersistentVolumeClaim": "api/v1",
    "Event": "api/v1",
    "Node": "api/v1",
    "Namespace": "api/v1",
    "Deployment": "apis/apps/v1",
    "PipelineModel": "apis/stageline.dev/v1alpha1",
    "PodDisruptionBudget": "apis/policy/v1",
    "NetworkPolicy": "apis/networking.k8s.io/v1",
    "Lease": "apis/coordination.k8s.io/v1",
}
_PLURALS: Final = {"NetworkPolicy": "networkpolicies"}
_CLUSTER_SCOPED: Final = ("Node", "Namespace")
_POLL_SECONDS: Final = 0.1
_T = TypeVar("_T")


class ClusterApi:
    """Synchronous calls; a refusal is an `AssertionError` with the server's words unless the test asks for it."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        """The object, or None."""
        response = self._client.get(f"{_collection(kind, namespace)}/{name}")
        return None if response.status_code == httpx.codes.NOT_FOUND else _answer(response)

    def list(self, kind: str, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Objects of a namespace, or of all of them, that carry all `labels`."""
        selector = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        response = self._client.get(_collection(kind, namespace), params={"labelSelector": selector})
        return [dict(each) for each in _answer(response)["items"]]

    def create(
        self, kind: str, manifest: Mapping[str, Any], namespace: str = "", dry_run: bool = False
    ) -> httpx.Response:
        """Create an object under strict field validation; the caller looks at the answer."""
        params = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._client.post(_collection(kind, namespace), json=manifest, params=params)

    def patch(self, kind: str, name: str, patch: Mapping[str, Any], namespace: str = "") -> dict[str, Any]:
        """Merge-patch an object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        path = f"{_collection(kind, namespace)}/{name}"
        return _answer(self._client.patch(path, content=json.dumps(patch), headers=headers))

    def evict(self, pod: str, namespace: str) -> httpx.Response:
        """Ask to evict a pod, as `kubectl drain` does; the caller looks at the answer."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        return self._client.post(f"{_collection('Pod', namespace)}/{pod}/eviction", json=eviction)

    def delete(self, kind: str, name: str, namespace: str = "", grace_seconds: int | None = None) -> dict[str, Any]:
        """Delete an object; one that is not there is no error. Returns the answer: the object where it ends slowly."""
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        response = self._client.request("DELETE", f"{_collection(kind, namespace)}/{name}", json=options)
        return {} if response.status_code == httpx.codes.NOT_FOUND else _answer(response)


def wait_until(what: str, look: Callable[[], _T], seconds: float, on_timeout: Callable[[], Any] = str) -> _T:
    """The first true value of `look()` within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{on_timeout()}")
        time.sleep(_POLL_SECONDS)
    return seen


def _collection(kind: str, namespace: str) -> str:
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    within = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTER_SCOPED else ""
    return f"/{_GROUP_PATHS[kind]}{within}/{plural}"


def _answer(response: httpx.Response) -> dict[str, Any]:
    assert response.is_success, (
        f"{response.request.method} {response.request.url}: {response.status_code} {response.text}"
    )
    return dict(response.json())
