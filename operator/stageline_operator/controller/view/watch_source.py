"""kopf as the source of watch events: streams, reconnects and logins are its work, deciding is not.

kopf runs in a thread with an event loop of its own, because it cancels whatever else it finds in its loop when it
ends, and it ends on any unexpected answer of the API server. Then it is started again. It sees raw events only
(`on.event`), so it patches nothing, keeps nothing in annotations and adds no finalizer; its Events and its peering
are off. It is given an identity, because it would ask the system for a user name, which a container's uid may lack.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from stageline_operator.controller.client.kopf_session import kopf_session
from stageline_operator.controller.client.resources import Resource
from stageline_operator.controller.view.running_watches import RunningWatches, watch_trace_config

OnWatchEvent = Callable[[Resource, str | None, dict[str, Any]], None]
"""Called in the operator's loop: resource, type (`ADDED`, `MODIFIED`, `DELETED`; None while listing), object."""

_FIRST_RESTART_SECONDS: Final = 1.0
_LONGEST_RESTART_SECONDS: Final = 15.0
_STEADY_SECONDS: Final = 60.0
_REQUEST_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 0.25

_log = logging.getLogger(__name__)


class WatchSource:
    """Watches `resources` in the namespaces given (all when empty) and hands every event to the operator's loop.

    `identity` is this process's name among its replicas.
    """

    def __init__(
        self,
        configuration: Configuration,
        resources: Sequence[Resource],
        namespaces: Sequence[str],
        on_event: OnWatchEvent,
        on_start: Callable[[], None],
        identity: str,
    ) -> None:
        self._configuration = configuration
        self._resources = tuple(resources)
        self._namespaces = tuple(namespaces)
        self._on_event = on_event
        self._on_start = on_start
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        root = urlsplit(str(configuration.host)).path.rstrip("/")
        self._watches = RunningWatches(
            [
                root + resource.path(namespace)
                for resource in self._resources
                for namespace in (self._namespaces if resource.namespaced else ()) or ("",)
            ]
        )

    def problem(self) -> str:
        """Which watch does not run; empty when all do."""
        return self._watches.problem(self._loop.time())

    async def run(self) -> None:
        """Watch until cancelled, whatever happens to kopf."""
        wait_seconds = _FIRST_RESTART_SECONDS
        while True:
            began = self._loop.time()
            self._on_start()
            await self._run_once()
            self._watches.all_broke(self._loop.time())
            if self._loop.time() - began > _STEADY_SECONDS:
                wait_seconds = _FIRST_RESTART_SECONDS
            _log.warning("watching ended; starting it again in %g s", wait_seconds)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(_LONGEST_RESTART_SECONDS, wait_seconds * 2)

    async def _run_once(self) -> None:
        stop = threading.Event()
        ended = asyncio.Event()

        def watch() -> None:
            try:
                asyncio.run(self._operate(stop))
            except BaseException as error:
                _log.warning("kopf ended: %s: %s", type(error).__name__, error)
            finally:
                self._call(ended.set)

        thread = threading.Thread(target=watch, name="kopf", daemon=True)
        thread.start()
        try:
            await ended.wait()
        finally:
            stop.set()
            # Joining in this loop would block it; what is left after the wait dies with the process.
            await asyncio.to_thread(thread.join, _STOP_SECONDS)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass  # the operator's loop is closed: nobody listens any more

    def _answered(self, path: str, is_watch: bool) -> None:
        if is_watch:
            self._watches.began(path)
        else:
            self._watches.broke(path, self._loop.time())

    async def _operate(self, stop: threading.Event) -> None:
        registry = kopf.OperatorRegistry()
        told = watch_trace_config(lambda path, is_watch: self._call(self._answered, path, is_watch))
        sessions: list[aiohttp.ClientSession] = []

        async def login(**_: Any) -> kopf.AiohttpSession:
            session = await kopf_session(self._configuration, told)
            sessions.append(session.aiohttp_session)
            return session

        kopf.on.login(registry=registry, id="stageline")(login)
        for resource in self._resources:
            self._register(registry, resource)
        options: dict[str, Any] = {"namespaces": list(self._namespaces)} if self._namespaces else {"clusterwide": True}
        options["identity"] = self._identity
        settings = self._kopf_settings()
        try:
            await kopf.operator(registry=registry, settings=settings, standalone=True, stop_flag=stop, **options)
        finally:
            # A thread of this loop's executor waits for it, and the loop's end for that thread, also when kopf failed.
            stop.set()
            # kopf closes those it used, not one with credentials that it knew to be refused.
            for session in sessions:
                await session.close()
            # Encrypted connections that kopf closed take some more turns of this loop to end.
            await asyncio.sleep(_CLOSE_SECONDS)

    def _register(self, registry: kopf.OperatorRegistry, resource: Resource) -> None:
        async def forward(event: Any, **_: Any) -> None:
            self._call(self._on_event, resource, event["type"], dict(event["object"]))

        place = (resource.group, resource.version, resource.plural)
        kopf.on.event(*place, registry=registry, id=f"watch-{resource.plural}")(forward)

    def _kopf_settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True  # the CRD is waited for before, and namespaces are given or all
        settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
        settings.networking.request_timeout = _REQUEST_SECONDS
        settings.networking.connect_timeout = _REQUEST_SECONDS
        settings.watching.connect_timeout = _REQUEST_SECONDS
        settings.watching.chunk_size = 500
        # Between ends of a stream lies one reconnection; servers that are down are asked at most so often.
        settings.watching.reconnect_backoff = 0.5
        for resource in self._resources:
            if resource.selector:
                place = (resource.group, resource.version, resource.plural)
                settings.watching.label_selectors[place] = resource.selector
        return settings
