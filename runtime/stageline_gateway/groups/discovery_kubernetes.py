"""Which groups exist, in a cluster: pods and PipelineModels of one namespace, listed again and again, and watched.

Each watch lasts `relist_seconds` at most; then everything is listed anew and replaces what was known, so an event that
never came can't leave a ghost for longer (its engine's failing probe takes it out of use long before). While the API
server can't be reached the last version stays in force.

The gateway's service account needs, in its namespace: `get`, `list` and `watch` of `pods` (core), and of
`pipelinemodels` (group `stageline.dev`). It reads nothing else and writes nothing.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_gateway.groups.discovered_groups import Served
from stageline_gateway.groups.pod_endpoints import STAGE_0_SELECTOR, endpoints_of

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_SECONDS: Final = 15.0
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 10.0
HTTP_OK: Final = 200


class ApiServerError(Exception):
    """The API server refused, or said something that can't be used; the text says what."""


def own_namespace() -> str:
    """The namespace of the pod this runs in, else `default`."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


async def load_configuration() -> Configuration:
    """Address and credentials: $KUBECONFIG, else the pod's service account, else ~/.kube/config; raises UserError."""
    configuration = Configuration()
    try:
        if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            # The loader would look at the environment once, when it is imported.
            file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
            await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=file, client_configuration=configuration, persist_config=False
            )
    except Exception as error:  # the loader raises whatever its YAML, its helper programs or its files raise
        raise UserError(f"The gateway can't log in to a cluster: {error}", USAGE_EXIT_CODE) from error
    return configuration


def check_login() -> None:
    """Raise UserError when there is no way to log in to a cluster."""
    asyncio.run(load_configuration())


@dataclass(slots=True)
class _Kind:
    """One kind of object: where it is, and what is known of it by uid; None before the first list."""

    path: str
    selector: str = ""
    objects: dict[str, dict[str, Any]] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """When the API server last listed these, or told of one."""

    def take(self, event: dict[str, Any]) -> None:
        """Apply one watch event."""
        known, changed = self.objects, event["object"]
        assert known is not None, "watched before it was listed"
        match event["type"]:
            case "ADDED" | "MODIFIED":
                known[changed["metadata"]["uid"]] = changed
            case "DELETED":
                known.pop(changed["metadata"]["uid"], None)
            case "BOOKMARK":
                pass
            case _:  # ERROR: the version is too old, or something worse; listing anew is right for both
                raise ApiServerError(str(changed.get("message", event["type"]))[:200])


@dataclass(slots=True)
class KubernetesDiscovery:
    """Feeds `served` from the API server."""

    namespace: str
    served: Served
    relist_seconds: int
    _client: ApiClient | None = None
    _configuration: Configuration | None = None
    _kinds: tuple[_Kind, _Kind] = field(init=False)

    def __post_init__(self) -> None:
        pods = _Kind(f"/api/v1/namespaces/{self.namespace}/pods", STAGE_0_SELECTOR)
        self._kinds = (pods, _Kind(f"/apis/stageline.dev/v1alpha1/namespaces/{self.namespace}/pipelinemodels"))

    def age_seconds(self) -> float:
        """How long ago the API server was last heard of the kind that it has been silent about the longest."""
        return time.monotonic() - min(kind.heard_at for kind in self._kinds)

    def refresh(self) -> None:
        """Nothing can be had without waiting."""

    async def run(self) -> None:
        """Keep watch until cancelled; raises UserError when there is no way to log in."""
        self._configuration = await load_configuration()
        self._client = ApiClient(self._configuration)
        try:
            await asyncio.gather(*(self._keep(kind) for kind in self._kinds))
        finally:
            await self._client.close()  # type: ignore[no-untyped-call]

    async def _keep(self, kind: _Kind) -> None:
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._list_and_watch(kind)
                pause_seconds = FIRST_PAUSE_SECONDS
            except Exception as error:  # also what login helpers raise: nothing that comes from outside may end this
                reason = f"{type(error).__name__}: {error}"[:300]
                self.served.fail(f"{self.served.source} can't be read: {reason}")
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _list_and_watch(self, kind: _Kind) -> None:
        async with asyncio.timeout(REQUEST_SECONDS), self._get(kind, {}) as answer:
            whole = json.loads(await answer.read())
        kind.objects = {each["metadata"]["uid"]: each for each in whole["items"]}
        kind.heard_at = time.monotonic()
        self._publish()
        query = {
            "watch": "true",
            "resourceVersion": whole["metadata"]["resourceVersion"],
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self.relist_seconds),
        }
        rest = b""
        async with asyncio.timeout(self.relist_seconds + REQUEST_SECONDS), self._get(kind, query) as answer:
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    kind.take(json.loads(line))
                if lines:
                    kind.heard_at = time.monotonic()
                    self._publish()

    def _publish(self) -> None:
        pods, models = (kind.objects for kind in self._kinds)
        if pods is not None and models is not None:
            self.served.accept(endpoints_of(pods.values(), models.values()))

    @asynccontextmanager
    async def _get(self, kind: _Kind, query: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200, its body still to come."""
        assert self._configuration is not None, "not running"
        assert self._client is not None, "not running"
        fields = query | ({"labelSelector": kind.selector} if kind.selector else {})
        url = f"{self._configuration.host}{kind.path}?{urlencode(fields)}"
        headers = {"Accept": "application/json", "User-Agent": "stageline-gateway"}
        if token := await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
            headers["Authorization"] = token
        limit_seconds = self.relist_seconds + 2 * REQUEST_SECONDS  # the caller's own limit comes first
        answer = await self._client.call_api("GET", url, headers, _request_timeout=limit_seconds)
        async with answer.response as response:
            if response.status != HTTP_OK:
                raise ApiServerError(f"status {response.status}: {(await response.text())[:200]}")
            yield response
