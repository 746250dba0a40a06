"""Which groups exist, in a cluster: pods and PipelineModels of a namespace, listed again and again, and watched.

Each watch lasts `relist_seconds` at most; then everything is listed anew and replaces what was known, so an event that
never came can't leave a ghost for longer (its engine's failing probe takes it out of use long before). While the API
server can't be reached the last version stays in force. Where it answers that this gateway may not read, that is
forgotten after `FORGET_SECONDS`: the Role was taken away, or went with its namespace, whose names shall be free.

The gateway's service account needs, in each namespace that it serves: `get`, `list` and `watch` of `pods` (core), and
of `pipelinemodels` (group `stageline.dev`), and `get` of the one Secret that holds the engines' keys. It reads nothing
else and writes nothing. A namespace that it may not read is asked again and again, since a Role may come any time.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from stageline_api.engine_access import KEYS_ENTRY, KEYS_SECRET
from stageline_api.resource import pipeline_model
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.groups.backends import DiscoveredGroups
from stageline_gateway.groups.pod_endpoints import STAGE_0_SELECTOR, endpoints_of
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.login import load_configuration
from stageline_kubernetes.resources import ApiResource

PODS: Final = ApiResource("Pod", "", "v1", "pods")
SECRETS: Final = ApiResource("Secret", "", "v1", "secrets")
MODELS: Final = ApiResource(pipeline_model.KIND, pipeline_model.GROUP, pipeline_model.VERSION, pipeline_model.PLURAL)
REQUEST_SECONDS: Final = 15.0
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 10.0
_FORBIDDEN: Final = 403
FORGET_SECONDS: Final = 300.0
KEY_SECONDS: Final = 1.0
"""Between two looks for the engines' keys while none is known."""

logger = logging.getLogger(__name__)


def check_login() -> None:
    """Raise UserError when there is no way to log in to a cluster."""
    asyncio.run(load_configuration())


class UnreadableObjectsError(Exception):
    """Pods and PipelineModels could be had, and one of them makes no sense."""


@dataclass(slots=True)
class _Kind:
    """One kind of object, and what is known of it by uid; None before the first list."""

    resource: ApiResource
    selector: str = ""
    objects: dict[str, Mapping[str, Any]] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """When the API server last listed these, or told of one."""
    problem: str = ""
    """Why they can't be had now."""
    forbidden_since: float | None = None
    """When the API server began to refuse them without a break."""

    def take(self, event: Mapping[str, Any]) -> None:
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
            case other:
                raise ValueError(f"a watch event of type {other!r}")


@dataclass(slots=True)
class KubernetesDiscovery:
    """Feeds `discovered` from the API server."""

    namespace: str
    discovered: DiscoveredGroups
    relist_seconds: int
    key: EngineKey
    forget_seconds: float = FORGET_SECONDS
    _kinds: tuple[_Kind, _Kind] = field(default_factory=lambda: (_Kind(PODS, STAGE_0_SELECTOR), _Kind(MODELS)))

    def age_seconds(self) -> float:
        """How long ago the API server was last heard of the kind that it has been silent about the longest."""
        return time.monotonic() - min(kind.heard_at for kind in self._kinds)

    def refresh(self) -> None:
        """Nothing can be had without waiting."""

    async def run(self) -> None:
        """Keep watch until cancelled; raises UserError when there is no way to log in."""
        # What fails is tried again by listing anew, so nothing is sent twice as it is.
        api = KubeApi(
            await load_configuration(), read_timeout_seconds=REQUEST_SECONDS, tries=1, user_agent="stageline-gateway"
        )
        try:
            await asyncio.gather(self._keep_key(api), *(self._keep(api, kind) for kind in self._kinds))
        finally:
            await api.close()

    async def _keep(self, api: KubeApi, kind: _Kind) -> None:
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._list_and_watch(api, kind)
                pause_seconds = FIRST_PAUSE_SECONDS
            except Exception as error:  # also what login helpers raise: nothing that comes from outside may end this
                kind.problem = "" if isinstance(error, UnreadableObjectsError) else _reason(error)
                self.discovered.fail(self._problem() or f"{self.discovered.source} can't be read: {error}")
                self._note_refusal(kind, _is_forbidden(error))
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _keep_key(self, api: KubeApi) -> None:
        """The operator makes the Secret before a namespace's first pod, so until then there is none."""
        said = ""
        while True:
            is_forbidden = False
            try:
                secret = await api.get(SECRETS, self.namespace, KEYS_SECRET)
                entry = (secret.get("data") or {}).get(KEYS_ENTRY, "")
                self.key.take(base64.b64decode(entry).decode())
                problem = "" if entry else f"the Secret has no {KEYS_ENTRY!r}"
            except Exception as error:  # as above; what it says must not be the Secret's content
                is_absent = isinstance(error, ApiError) and error.is_not_found
                problem = "" if is_absent else f"{type(error).__name__}: {error}"[:300]
                is_forbidden = _is_forbidden(error)
            if problem not in ("", said):
                logger.warning("Secret %s of namespace %s can't be used: %s", KEYS_SECRET, self.namespace, problem)
            said = problem
            unknown_seconds = LONGEST_PAUSE_SECONDS if is_forbidden else KEY_SECONDS
            await asyncio.sleep(self.relist_seconds if self.key.authorization else unknown_seconds)

    def _problem(self) -> str:
        reasons = "; ".join(kind.problem for kind in self._kinds if kind.problem)
        return f"{self.discovered.source} can't be read: {reasons}" if reasons else ""

    async def _list_and_watch(self, api: KubeApi, kind: _Kind) -> None:
        listing = await api.list(kind.resource, self.namespace, kind.selector)
        kind.objects = {each["metadata"]["uid"]: each for each in listing.items}
        self._publish(kind)
        events = api.watch(kind.resource, self.namespace, kind.selector, listing.version, self.relist_seconds)
        async with aclosing(events):
            async for arrived in events:
                for event in arrived:
                    kind.take(event)
                self._publish(kind)

    def _publish(self, heard: _Kind) -> None:
        heard.heard_at, heard.problem, heard.forbidden_since = time.monotonic(), "", None
        self._tell()

    def _note_refusal(self, kind: _Kind, is_forbidden: bool) -> None:
        now = time.monotonic()
        kind.forbidden_since = (kind.forbidden_since or now) if is_forbidden else None
        if kind.objects and is_forbidden and now - (kind.forbidden_since or now) >= self.forget_seconds:
            kind.objects = {}
            self._tell()

    def _tell(self) -> None:
        pods, models = (kind.objects for kind in self._kinds)
        if pods is not None and models is not None:
            try:
                endpoints = endpoints_of(pods.values(), models.values())
            except Exception as error:  # of any kind: nothing checks what somebody writes into a status
                raise UnreadableObjectsError(f"{type(error).__name__}: {error}"[:300]) from error
            self.discovered.accept(endpoints, self._problem())


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error, ApiError) and error.status == _FORBIDDEN


def _reason(error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"[:300]
    if _is_forbidden(error):
        return f"this gateway's Role there is missing or allows too little ({reason})"
    return reason
