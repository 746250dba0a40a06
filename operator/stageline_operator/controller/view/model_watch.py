"""kopf's watch of the PipelineModels of one namespace (empty: of all): raw events of the operator's own resource.

kopf runs in a thread with its own event loop, because at its end it cancels every task in its loop, and it ends on any
unexpected response of the API server. It is then restarted. It only gets raw events (`on.event`), so it patches
nothing, keeps no annotations and adds no finalizer; its Events and its peering are off. It gets an explicit identity:
otherwise it asks the system for a user name, which a container's uid may lack. It misses deletions while it does not
watch, so a list follows each start.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, Final

import kopf
from kubernetes.aio.client import Configuration

from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reflector import WATCH_SECONDS
from stageline_operator.controller.client.resources import PIPELINE_MODEL

_FIRST_RESTART_SECONDS: Final = 1.0
_LONGEST_RESTART_SECONDS: Final = 15.0
_STEADY_SECONDS: Final = 5.0
"""After this time a started kopf counts as watching: a refused watch ends it sooner."""
_LASTED_SECONDS: Final = 60.0
_REQUEST_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 0.25

_log = logging.getLogger(__name__)


class ModelWatch:
    """`identity` is this process's name among its replicas. Callbacks run in the operator's loop:

    `heard` gets events of the watch, and an empty list when kopf starts to watch. `failed` gets the reason of each
    failed try. `relist` is called when a full list may contain changes that the watch missed.
    """

    def __init__(
        self,
        configuration: Configuration,
        api: KubeApi,
        namespace: str,
        heard: Callable[[Sequence[Mapping[str, Any]]], None],
        failed: Callable[[ApiError], None],
        relist: Callable[[], None],
        identity: str,
    ) -> None:
        self._configuration = configuration
        self._api = api
        self._namespace = namespace
        self._heard = heard
        self._failed = failed
        self._relist = relist
        self._identity = identity
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Watch until cancelled, and restart kopf when it ends."""
        wait_seconds = _FIRST_RESTART_SECONDS
        while True:
            began = self._loop.time()
            try:
                await self._check_right()
                await self._run_kopf()
            except ApiError as error:
                self._failed(error)
            if self._loop.time() - began > _LASTED_SECONDS:
                wait_seconds = _FIRST_RESTART_SECONDS
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(_LONGEST_RESTART_SECONDS, wait_seconds * 2)

    async def _check_right(self) -> None:
        """Raises `ApiError` if PipelineModels can't be watched, which kopf might not report."""
        async with aclosing(self._api.watch(PIPELINE_MODEL, self._namespace, "", 0, 1)) as batches:
            await anext(batches)

    async def _run_kopf(self) -> None:
        """Raises `ApiError` when kopf has ended."""
        stop, ready, ended = threading.Event(), Future[Any](), asyncio.Event()
        reasons: list[str] = []

        def watch() -> None:
            try:
                asyncio.run(self._operate(stop, ready))
            except BaseException as error:
                reasons.append(f": {type(error).__name__}: {error}")
            finally:
                self._call(ended.set)

        thread = threading.Thread(target=watch, name="kopf", daemon=True)
        thread.start()
        steady = asyncio.create_task(self._report_steady(ready))
        try:
            await ended.wait()
        finally:
            steady.cancel()
            stop.set()
            # Joining in this loop would block it; a thread that outlasts the wait ends with the process.
            await asyncio.to_thread(thread.join, _STOP_SECONDS)
        raise ApiError(f"watch {PIPELINE_MODEL.plural}: kopf ended{''.join(reasons)}"[:500], 0)

    async def _report_steady(self, ready: "Future[Any]") -> None:
        await asyncio.wrap_future(ready)
        await asyncio.sleep(_STEADY_SECONDS)
        self._heard([])
        self._relist()

    def _take(self, kind: str | None, manifest: dict[str, Any]) -> None:
        """Forward one event. `kind` None is an object of a list by kopf: no sign of a watch, and the full list contains
        it.
        """
        if kind is None:
            self._relist()
        else:
            self._heard([{"type": kind, "object": manifest}])

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass  # the operator's loop is closed

    async def _operate(self, stop: threading.Event, ready: "Future[Any]") -> None:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await _connection(self._configuration)

        async def forward(event: Any, **_: Any) -> None:
            self._call(self._take, event["type"], dict(event["object"]))

        kopf.on.login(registry=registry, id="stageline")(login)
        place = (PIPELINE_MODEL.group, PIPELINE_MODEL.version, PIPELINE_MODEL.plural)
        kopf.on.event(*place, registry=registry, id="watch")(forward)
        options: dict[str, Any] = {"namespaces": [self._namespace]} if self._namespace else {"clusterwide": True}
        options |= {"identity": self._identity, "stop_flag": stop, "ready_flag": ready}
        try:
            await kopf.operator(registry=registry, settings=_settings(), standalone=True, **options)
        finally:
            # A thread of this loop's executor waits for the event, and the loop's end waits for that thread, even if
            # kopf failed.
            stop.set()
            # TLS connections that kopf closed need a few more iterations of this loop to end.
            await asyncio.sleep(_CLOSE_SECONDS)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the CRD exists, and namespaces are fixed or all
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    settings.networking.request_timeout = _REQUEST_SECONDS
    settings.networking.connect_timeout = _REQUEST_SECONDS
    settings.networking.error_backoffs = (0.5, 1.0)  # a lasting error ends kopf and so is reported
    settings.watching.connect_timeout = _REQUEST_SECONDS
    settings.watching.chunk_size = 500
    # The same as the reflector's: a hanging connection is dropped, and the watch resumes.
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + _REQUEST_SECONDS
    # kopf reconnects after each end of a stream; this limits the rate while servers are down.
    settings.watching.reconnect_backoff = 0.5
    return settings


async def _connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """The operator's address and credentials in kopf's terms; a token is read again each time."""
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=str(configuration.host),
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=(scheme or "Bearer") if token else None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
