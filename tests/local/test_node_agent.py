"""The node agent before an API server whose answers and watch events come in an order that a test chooses."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from cluster.kubelet.agent import NodeAgent
from cluster.kubelet.api_access import ApiAccess
from cluster.kubelet.api_client import ApiClient, Change, Listing
from cluster.kubelet.node_objects import NodeIdentity
from cluster.node_pods import IMAGE, pod_of, python_container
from stageline_local.node.images import LocalImages, machine_environment

ACCESS = ApiAccess("https://127.0.0.1:1", ssl.create_default_context(), {}, "")


class LateAnswers(ApiClient):
    """One pod, which is deleted while its status is being patched: the watch says so before the patch is answered."""

    def __init__(self, pod: dict[str, Any]) -> None:
        super().__init__(ACCESS)
        self._pod = pod
        self._ending = asyncio.Event()
        self._ending_is_known = asyncio.Event()
        self.gone = asyncio.Event()

    async def get(self, _path: str) -> dict[str, Any] | None:
        return {}

    async def patch(self, path: str, patch: Mapping[str, Any], _content_type: str) -> dict[str, Any]:
        is_running = patch.get("status", {}).get("phase") == "Running"
        if path.endswith("/pods/p/status") and is_running and not self._ending.is_set():
            self._ending.set()
            await self._ending_is_known.wait()
        return self._at(5)

    async def delete(self, path: str, _options: Mapping[str, Any]) -> None:
        assert path.endswith("/pods/p"), path
        self.gone.set()

    async def list_and_watch(self, _path: str) -> AsyncIterator[Listing | Change]:
        yield Listing((self._at(1),))
        await self._ending.wait()
        yield Change("MODIFIED", self._at(6, deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=1))
        # The one who watches asks on when it has taken the event in.
        self._ending_is_known.set()
        await asyncio.Event().wait()

    def _at(self, version: int, **more: Any) -> dict[str, Any]:
        return self._pod | {"metadata": self._pod["metadata"] | {"resourceVersion": str(version), **more}}


def test_a_deletion_that_the_watch_tells_before_an_older_answer_comes_is_not_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        pod = pod_of(python_container("time.sleep(600)"), nodeName="node-a")
        pod["metadata"]["uid"] = "u-1"
        images = LocalImages(frozenset({IMAGE}), machine_environment())
        identity = NodeIdentity("node-a", {"memory": "1Ti"})
        async with LateAnswers(pod) as client:
            agent = asyncio.create_task(NodeAgent(identity, client, ACCESS, tmp_path, images).run())
            try:
                async with asyncio.timeout(120):
                    await client.gone.wait()
            finally:
                agent.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await agent

    asyncio.run(scenario())
