"""Discovers groups in a cluster: pods and PipelineModels of a namespace, each kept up to date by a reflector.

A full list replaces the known objects every `relist_seconds`, so a missed event can't leave a stale object for longer
(its engine's failing probe takes it out of use long before). While the API server can't be reached the last version
stays in force. An invalid object affects no other: its own last good version is used, if there is one, and the problem
is logged and shown in a metric. If the API server denies read access, the known objects are dropped after
`FORGET_SECONDS`: the Role was removed, alone or with its namespace, and the model names must become free.

The gateway's service account needs, in each namespace that it serves: `get`, `list` and `watch` of `pods` (core), and
of `pipelinemodels` (group `stageline.dev`), and `get` of the one Secret that holds the engines' keys. It reads and
writes no other object. It keeps retrying a namespace that it may not read, since a Role may be added any time.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stageline_api.engine_access import KEYS_ENTRY, KEYS_SECRET
from stageline_api.resource import pipeline_model
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.groups.backends import DiscoveredGroups
from stageline_gateway.groups.pod_endpoints import STAGE_0_SELECTOR, check_model, check_pod, endpoints_of
from stageline_kubernetes.client import KubeApi, Listing
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.login import load_configuration
from stageline_kubernetes.reflector import Reflector
from stageline_kubernetes.resources import ApiResource

PODS: Final = ApiResource("Pod", "", "v1", "pods")
SECRETS: Final = ApiResource("Secret", "", "v1", "secrets")
MODELS: Final = ApiResource(pipeline_model.KIND, pipeline_model.GROUP, pipeline_model.VERSION, pipeline_model.PLURAL)
REQUEST_SECONDS: Final = 15.0
_FORBIDDEN: Final = 403
FORBIDDEN_KEY_SECONDS: Final = 10.0
"""Between two looks for keys that may not be read."""
FORGET_SECONDS: Final = 300.0
MAX_NAMED: Final = 5
"""Objects that make no sense are named up to so many, in the log and the state."""
KNOWN_KEY_SECONDS: Final = 30.0
"""Between two looks whether the engines' keys have changed."""
KEY_SECONDS: Final = 1.0
"""Between two looks for the engines' keys while none is known."""

logger = logging.getLogger(__name__)


def check_login() -> None:
    """Raise UserError when there is no way to log in to a cluster."""
    asyncio.run(load_configuration())


@dataclass(slots=True)
class _Kind:
    """One kind of object, and the known objects by uid; None before the first list. A reflector feeds it."""

    resource: ApiResource
    check: Callable[[Mapping[str, Any]], None]
    """Raises, whatever it may be, for an object that makes no sense."""
    discovery: "KubernetesDiscovery"
    selector: str = ""
    objects: dict[str, Mapping[str, Any]] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """When the API server last listed these, or sent an event for one."""
    problem: str = ""
    """Why they can't be had now."""
    forbidden_since: float | None = None
    """When the API server began to refuse them without a break."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Objects that make no sense, by uid, each with why."""

    def listed(self, listing: Listing) -> None:
        """Replace all known objects by a list, but keep the last good versions of invalid ones."""
        before, self.objects, self.unreadable = self.objects or {}, {}, {}
        for each in listing.items:
            self._put(each, before)
        self._note_contact()

    def heard(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Apply the events of a watch."""
        known = self.objects
        assert known is not None, "watched before it was listed"
        for event in events:
            if event["type"] == "DELETED":
                known.pop(_uid_of(event["object"]), None)
                self.unreadable.pop(_uid_of(event["object"]), None)
            else:
                self._put(event["object"], known)
        self._note_contact()

    def failed(self, error: ApiError) -> None:
        """Forget what may not be read for long."""
        now, self.problem = time.monotonic(), str(error)[:300]
        if error.status != _FORBIDDEN:
            self.forbidden_since = None
        else:
            self.problem = f"this gateway's Role there is missing or allows too little ({self.problem})"
            self.forbidden_since = now if self.forbidden_since is None else self.forbidden_since
            if self.objects and now - self.forbidden_since >= self.discovery.forget_seconds:
                self.objects = {}
        self.discovery.tell()

    def _note_contact(self) -> None:
        self.heard_at, self.problem, self.forbidden_since = time.monotonic(), "", None
        self.discovery.tell()

    def _put(self, changed: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]) -> None:
        known = self.objects
        assert known is not None, "nothing was listed"
        uid = _uid_of(changed)
        try:
            if not uid:
                raise ValueError("it has no uid")
            self.check(changed)
        except Exception as error:  # of any kind: a status is not validated
            self.unreadable[uid] = f"{self._name_of(changed)} makes no sense ({type(error).__name__}: {error})"[:300]
            if uid in before:
                known[uid] = before[uid]
        else:
            self.unreadable.pop(uid, None)
            known[uid] = changed

    def _name_of(self, changed: Mapping[str, Any]) -> str:
        try:
            return f"{self.resource.kind} {changed['metadata']['name']}"
        except (KeyError, TypeError):
            return f"a {self.resource.kind} without a name"


@dataclass(slots=True)
class KubernetesDiscovery:
    """Feeds `discovered` from the API server."""

    namespace: str
    discovered: DiscoveredGroups
    relist_seconds: float
    key: EngineKey
    forget_seconds: float = FORGET_SECONDS
    _kinds: tuple[_Kind, _Kind] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = (_Kind(PODS, check_pod, self, STAGE_0_SELECTOR), _Kind(MODELS, check_model, self))

    def age_seconds(self) -> float:
        """How long ago the API server was last heard of the kind that it has been silent about the longest."""
        return time.monotonic() - min(kind.heard_at for kind in self._kinds)

    def refresh(self) -> None:
        """Nothing can be had without waiting."""

    async def run(self) -> None:
        """Keep watch until cancelled; raises UserError when there is no way to log in."""
        # A failure is retried by listing again, so the API client itself never retries.
        api = KubeApi(
            await load_configuration(), read_timeout_seconds=REQUEST_SECONDS, tries=1, user_agent="stageline-gateway"
        )
        reflectors = (
            Reflector(api, kind.resource, self.namespace, kind.selector, kind, self.relist_seconds)
            for kind in self._kinds
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for each in (self._keep_key(api), *(each.run() for each in reflectors)):
                    tasks.create_task(each)
        finally:
            await api.close()

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
            except Exception as error:  # any content is possible; the message must not contain the Secret's content
                is_absent = isinstance(error, ApiError) and error.is_not_found
                problem = "" if is_absent else f"{type(error).__name__}: {error}"[:300]
                is_forbidden = isinstance(error, ApiError) and error.status == _FORBIDDEN
            if problem not in ("", said):
                logger.warning("Secret %s of namespace %s can't be used: %s", KEYS_SECRET, self.namespace, problem)
            said = problem
            unknown_seconds = FORBIDDEN_KEY_SECONDS if is_forbidden else KEY_SECONDS
            await asyncio.sleep(KNOWN_KEY_SECONDS if self.key.authorization else unknown_seconds)

    def _problem(self) -> str:
        source = self.discovered.source
        reasons = [f"{source} can't be read: {kind.problem}" for kind in self._kinds if kind.problem]
        unreadable = [f"{source}: {why}" for kind in self._kinds for why in kind.unreadable.values()]
        return "; ".join([*reasons, *unreadable[:MAX_NAMED]])

    def tell(self) -> None:
        """A kind has changed, or can't be had."""
        pods, models = (kind.objects for kind in self._kinds)
        problem = self._problem()
        if pods is not None and models is not None:
            self.discovered.accept(endpoints_of(pods.values(), models.values()), problem)
        elif problem:
            self.discovered.fail(problem)


def _uid_of(changed: Mapping[str, Any]) -> str:
    """Empty where there is none: such an object is never known."""
    try:
        return str(changed["metadata"]["uid"])
    except (KeyError, TypeError):
        return ""
