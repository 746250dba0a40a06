"""The kubelet's loop: what the API server holds for this node, what the process node runs, and one step to agree.

Level-triggered: every pass looks at all pods of the node, so a missed event, a restarted API server or a restarted
agent costs nothing but time. Pods that ran before this agent started are over, since containers end with their node.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from cluster.kubelet.api_access import ApiAccess
from cluster.kubelet.api_client import ApiClient, Change, Listing
from cluster.kubelet.heartbeat import Heartbeat
from cluster.kubelet.node_objects import NodeIdentity
from cluster.kubelet.pod_admission import PodAdmission
from cluster.kubelet.reported_status import failed_patch, lost_patch, status_patch
from stageline_api.errors import UserError
from stageline_api.resource.quantities import parse_quantity
from stageline_kubernetes.errors import ApiError
from stageline_local.node.images import LocalImages
from stageline_local.node.process_node import PodKey, ProcessNode
from stageline_local.session.object_store import ObjectStore

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 0.5
_REFETCH_SECONDS: Final = 1.0
_ORPHAN_GRACE_SECONDS: Final = 1.0
_ENDED: Final = ("Succeeded", "Failed")
_PATCH: Final = "application/strategic-merge-patch+json"


class NodeAgent:
    """One node of a cluster. Belongs to one event loop, in the main thread."""

    def __init__(
        self, identity: NodeIdentity, client: ApiClient, access: ApiAccess, state_dir: Path, images: LocalImages
    ) -> None:
        self._identity = identity
        self._client = client
        self._store = ObjectStore()
        self._changed = asyncio.Event()
        memory_bytes = int(parse_quantity(identity.capacity["memory"]))
        self._node = ProcessNode(
            state_dir, self._store, images, self._changed.set, lambda: memory_bytes, other_names=self._pod_names
        )
        self._admission = PodAdmission(client, access, self._store, state_dir / "accounts")
        self._heartbeat = Heartbeat(identity, client)
        self._known: dict[PodKey, dict[str, Any]] = {}
        """All pods of the cluster, as the API server last showed them."""
        self._held: dict[PodKey, str] = {}
        """Uids of the pods that were handed to the process node."""
        self._sent: dict[str, dict[str, Any]] = {}
        """Last status sent, by uid."""

    async def run(self) -> None:
        """Be a node until cancelled; then every container is ended."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeat.run())
                group.create_task(self._watch())
                group.create_task(self._keep_in_step())
        finally:
            await self._node.close(_ORPHAN_GRACE_SECONDS)

    async def _watch(self) -> None:
        while True:
            try:
                async for seen in self._client.list_and_watch("/api/v1/pods"):
                    self._take(seen)
                    self._changed.set()
            except (httpx.TransportError, ApiError) as error:
                _log.info("the watch ended and starts again: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _take(self, seen: Listing | Change) -> None:
        match seen:
            case Listing(items):
                self._known = {_key(pod): pod for pod in items}
            case Change("DELETED", pod):
                self._known.pop(_key(pod), None)
            case Change(_, pod):
                self._known[_key(pod)] = pod

    async def _keep_in_step(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REFETCH_SECONDS if self._waits_for_objects() else None):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._pass()
            except httpx.TransportError as error:
                _log.info("the API server can't be reached; trying again: %s", error)
                self._try_again_soon()

    def _try_again_soon(self) -> None:
        asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._changed.set)

    async def _pass(self) -> None:
        mine = {key for key, pod in self._known.items() if pod["spec"].get("nodeName") == self._identity.name}
        running = {_key(pod): pod for pod in self._node.pods()}
        for key in sorted(mine | set(self._held)):
            try:
                await self._step(key, self._known.get(key) if key in mine else None, running.get(key))
            except ApiError as error:
                _log.warning("pod %s/%s: %s", *key, error)
                self._try_again_soon()

    async def _step(self, key: PodKey, wanted: Mapping[str, Any] | None, running: Mapping[str, Any] | None) -> None:
        """Bring one pod a step nearer to what the API server holds."""
        if running is None:
            self._sent.pop(self._held.pop(key, ""), None)
            if wanted is not None:
                await self._begin_or_end(key, wanted)
        elif wanted is None or wanted["metadata"]["uid"] != self._held[key]:
            # Removed by force: nobody waits for it any more.
            self._node.delete_pod(*key, grace_seconds=_ORPHAN_GRACE_SECONDS)
        else:
            if "deletionTimestamp" in wanted["metadata"]:
                grace_seconds = float(wanted["metadata"].get("deletionGracePeriodSeconds", 0))
                self._node.delete_pod(*key, grace_seconds=grace_seconds)
            await self._report(wanted, running)

    async def _begin_or_end(self, key: PodKey, wanted: Mapping[str, Any]) -> None:
        status = wanted.get("status", {})
        if "deletionTimestamp" in wanted["metadata"]:
            preconditions = {"uid": wanted["metadata"]["uid"]}
            await self._client.delete(_path(wanted), {"gracePeriodSeconds": 0, "preconditions": preconditions})
        elif status.get("phase") in _ENDED:
            return
        elif "startTime" in status:
            await self._patch_status(wanted, lost_patch(wanted, datetime.now(UTC)))
        else:
            await self._begin(key, wanted)

    async def _begin(self, key: PodKey, wanted: Mapping[str, Any]) -> None:
        manifest = await self._admission.prepare(wanted)
        try:
            self._node.create_pod(manifest)
        except UserError as refusal:
            await self._patch_status(wanted, failed_patch(wanted, "UnsupportedPodField", str(refusal)))
            return
        self._held[key] = wanted["metadata"]["uid"]

    async def _report(self, wanted: Mapping[str, Any], running: Mapping[str, Any]) -> None:
        uid, status = wanted["metadata"]["uid"], running["status"]
        if _waits(running):
            await self._admission.fetch_references(running)
        if self._sent.get(uid) != status or _is_ready(wanted) != _is_ready(running):
            # The second half: controllers write over the status of pods whose node was silent.
            await self._patch_status(wanted, status_patch(wanted, status, self._identity.address, datetime.now(UTC)))
            self._sent[uid] = status

    async def _patch_status(self, pod: Mapping[str, Any], patch: Mapping[str, Any]) -> None:
        try:
            self._learn(await self._client.patch(f"{_path(pod)}/status", patch, _PATCH))
        except ApiError as error:
            # Gone, or another pod by now: the watch will say so.
            if not (error.is_not_found or error.is_conflict):
                raise

    def _learn(self, answer: dict[str, Any]) -> None:
        """Keep what a write was answered with, unless the watch told of something later first, such as a deletion."""
        known = self._known.get(_key(answer))
        if known is not None and _version(known) < _version(answer):
            self._known[_key(answer)] = answer

    def _waits_for_objects(self) -> bool:
        return any(_waits(pod) for pod in self._node.pods())

    def _pod_names(self) -> dict[str, str]:
        """Addresses by `<hostname>.<subdomain>.<namespace>` over all nodes: what the cluster's DNS would answer."""
        names = {}
        for (namespace, name), pod in self._known.items():
            spec, address = pod["spec"], pod.get("status", {}).get("podIP")
            if spec.get("subdomain") and address:
                names[f"{spec.get('hostname', name)}.{spec['subdomain']}.{namespace}"] = address
        return names


def _key(pod: Mapping[str, Any]) -> PodKey:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _path(pod: Mapping[str, Any]) -> str:
    namespace, name = _key(pod)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _version(pod: Mapping[str, Any]) -> int:
    """Versions of one kind of object grow, also from one life of a name to the next."""
    return int(pod["metadata"]["resourceVersion"])


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _waits(pod: Mapping[str, Any]) -> bool:
    """Whether a container waits for an object that was not there."""
    states = [each["state"] for each in [*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"]]]
    return any(state.get("waiting", {}).get("reason") == "CreateContainerConfigError" for state in states)
