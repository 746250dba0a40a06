"""Nodes whose kubelet runs nothing: it calls every bound pod ready at once, and lets deleted ones go.

For measuring the control plane alone. All pods share one address, where one endpoint answers for every stage.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self

import httpx

from cluster.kubelet.api_access import ApiAccess
from cluster.kubelet.api_client import ApiClient, Change, Listing
from cluster.kubelet.heartbeat import Heartbeat
from cluster.kubelet.node_objects import NodeIdentity
from stageline_api import ports
from stageline_api.health import Phase, StageStatus
from stageline_api.runtime_config import LayerRange
from stageline_kubernetes.errors import ApiError
from stageline_local.node.pod_status import timestamp

POD_ADDRESS: Final = "127.200.0.1"
_PATCH: Final = "application/strategic-merge-patch+json"
_AT_ONCE: Final = 16
_CAPACITY: Final = {"cpu": "1000", "memory": "4Ti", "pods": "250", "nvidia.com/gpu": "1000"}
_RETRY_SECONDS: Final = 0.5
_START_SECONDS: Final = 30.0
_log = logging.getLogger(__name__)


class CountingKubelet:
    """The kubelet of `node_count` nodes, in a thread with an event loop of its own, within a `with` block."""

    def __init__(self, access: ApiAccess, node_count: int) -> None:
        self._access = access
        self._nodes = [NodeIdentity(f"bench-{index}", _CAPACITY) for index in range(node_count)]
        self._seen: dict[str, bool] = {}
        """By uid: whether the pod was told to go."""
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._running = threading.Event()
        self._end: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        """Register the nodes and begin."""
        self._thread.start()
        self._running.wait(_START_SECONDS)
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop, and give up the address that all pods share."""
        self._end()
        self._thread.join()

    def _live(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._run())

    async def _run(self) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._end = partial(loop.call_soon_threadsafe, task.cancel)
        self._running.set()
        server = await asyncio.start_server(_answer_as_a_stage, POD_ADDRESS, ports.STAGE_HEALTH)
        async with server, ApiClient(self._access) as client, asyncio.TaskGroup() as group:
            for node in self._nodes:
                group.create_task(Heartbeat(node, client).run())
            group.create_task(self._watch(client))

    async def _watch(self, client: ApiClient) -> None:
        places = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async for seen in client.list_and_watch("/api/v1/pods"):
                        for pod in _pods_in(seen):
                            group.create_task(self._treat(client, pod, places))
                except (httpx.TransportError, ApiError) as error:
                    _log.info("the watch starts again: %s", error)
                    await asyncio.sleep(_RETRY_SECONDS)

    async def _treat(self, client: ApiClient, pod: Mapping[str, Any], places: asyncio.Semaphore) -> None:
        metadata = pod["metadata"]
        going = "deletionTimestamp" in metadata
        if "nodeName" not in pod["spec"] or self._seen.get(metadata["uid"]) == going:
            return
        self._seen[metadata["uid"]] = going
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        async with places:
            try:
                if going:
                    await client.delete(path, {"gracePeriodSeconds": 0})
                else:
                    await client.patch(f"{path}/status", {"status": _ready_status(pod)}, _PATCH)
            except (httpx.TransportError, ApiError) as error:
                _log.warning("%s: %s", path, error)
                del self._seen[metadata["uid"]]


def _pods_in(seen: Listing | Change) -> list[dict[str, Any]]:
    match seen:
        case Listing(items):
            return list(items)
        case Change("DELETED", _):
            return []
        case Change(_, pod):
            return [pod]


def _ready_status(pod: Mapping[str, Any]) -> dict[str, Any]:
    now = timestamp(datetime.now(UTC))
    done = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}

    def _status(container: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        known = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        return {**known, "ready": True, "started": True, "state": state}

    return {
        "phase": "Running",
        "podIP": POD_ADDRESS,
        "podIPs": [{"ip": POD_ADDRESS}],
        "startTime": now,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("Initialized", "ContainersReady", "Ready")
        ],
        "initContainerStatuses": [_status(each, done) for each in pod["spec"].get("initContainers", [])],
        "containerStatuses": [_status(each, {"running": {"startedAt": now}}) for each in pod["spec"]["containers"]],
    }


async def _answer_as_a_stage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one answer; which stage is asked can't be told, so each says that it holds all layers."""
    await reader.readuntil(b"\r\n\r\n")
    said = StageStatus(
        phase=Phase.READY, stage=0, stage_count=1, incarnation=1, layers=LayerRange(first=0, last=3)
    ).model_dump_json()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n"
    )
    writer.write((head + said).encode())
    await writer.drain()
    writer.close()
