"""Registers a node and keeps its Lease fresh: how a cluster knows that the node lives."""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Final

import httpx

from cluster.kubelet.api_client import ApiClient
from cluster.kubelet.node_objects import (
    LEASE_NAMESPACE,
    NodeIdentity,
    lease_manifest,
    node_manifest,
    node_status,
)
from stageline_kubernetes.errors import ApiError

_log = logging.getLogger(__name__)

_BEAT_SECONDS: Final = 2.0
_LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"


class Heartbeat:
    """The heartbeats of one node."""

    def __init__(self, node: NodeIdentity, client: ApiClient) -> None:
        self._node = node
        self._client = client

    async def run(self) -> None:
        """Register, then beat until cancelled; an API server that is away is tried again."""
        registered = False
        while True:
            try:
                if not registered:
                    await self._register()
                    registered = True
                await self._beat()
            except httpx.TransportError as error:
                _log.info("no heartbeat: the API server can't be reached: %s", error)
            except ApiError as error:
                # Also when the Node was deleted meanwhile: it is made anew.
                _log.warning("no heartbeat: %s", error)
                registered = False
            await asyncio.sleep(_BEAT_SECONDS)

    async def _register(self) -> None:
        path = f"/api/v1/nodes/{self._node.name}"
        manifest = node_manifest(self._node, datetime.now(UTC))
        if await self._client.get(path) is None:
            await self._client.create("/api/v1/nodes", manifest)
        else:
            labels = {"metadata": {"labels": manifest["metadata"]["labels"]}}
            await self._client.patch(path, labels, "application/merge-patch+json")

    async def _beat(self) -> None:
        now = datetime.now(UTC)
        lease = lease_manifest(self._node, now)
        if await self._client.get(f"{_LEASES}/{self._node.name}") is None:
            await self._client.create(_LEASES, lease)
        else:
            await self._client.patch(
                f"{_LEASES}/{self._node.name}", {"spec": lease["spec"]}, "application/merge-patch+json"
            )
        # The controllers write "Unknown" over a silent node's conditions; only the node itself takes that back.
        status = {"status": node_status(self._node, now)}
        path = f"/api/v1/nodes/{self._node.name}/status"
        await self._client.patch(path, status, "application/strategic-merge-patch+json")
