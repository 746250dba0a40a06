"""Serving until a signal, then draining: the process's sockets and signals.

The first SIGTERM makes the admin port report not ready. After load balancers had time to notice, the gateway closes the
listening socket and lets open answers finish. Answers still open after the drain time end with an error event. SIGINT,
which a person sends, skips the wait. A second signal ends the process at once. `DRAIN_SIGNAL` only rejects new
requests: the process continues until another signal ends it.
"""

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import uvicorn
import uvloop
from fastapi import FastAPI

from stageline_api.engine_access import is_loopback
from stageline_api.standing_heap import settle_heap
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.large_work import large_work
from stageline_gateway.server.http_protocol import BoundedConfig, GatewayProtocol
from stageline_gateway.server.tls import TlsFiles, new_context, watch
from stageline_gateway.server.tls_listener import TlsListener
from stageline_gateway.settings import DRAIN_SIGNAL

logger = logging.getLogger(__name__)
_CALLBACK: Final = "Exception in callback"

OPEN_FILES: Final = 65536
"""Each connection is one, to a client or to an engine; many systems allow 1024 until they are asked."""
LARGE_BLOCK_BYTES: Final = 1024 * 1024
"""A block of as many is the system's own, not a part of what the allocator keeps."""
_MMAP_THRESHOLD: Final = -3
"""`M_MMAP_THRESHOLD` of glibc's `malloc.h`."""
_START_POLL_SECONDS: Final = 0.01
_DATE_SECONDS: Final = 1.0
YOUNG_OBJECTS: Final = 5_000
"""The garbage collector runs after so many more tracked objects were made than freed. Python's own number (700, or
2,000) is a dozen streams' objects, which it would scan repeatedly without result: a request's objects are freed without
it. Not more, because a missed cycle holds a request's body, and the threshold doesn't count bytes."""
FAREWELL_SECONDS: Final = 5.0
"""How long answers that were cut have to send their error event."""


class _QuietServer(uvicorn.Server):
    """uvicorn raises the signal that stopped it again, so a clean drain would look like a crash; and it polls ten times
    a second whether to stop. This one is stopped by `stop`, and wakes once a second for the answers' `Date`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Stop listening; `serve` returns once open answers have ended."""
        self.should_exit = True
        self._stopped.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(counter=0):  # of each tenth, which makes the `Date`
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._stopped.wait()


@dataclass(frozen=True, slots=True)
class Sockets:
    public: socket.socket
    admin: socket.socket
    tls: TlsFiles | None = None
    """For clients; the admin port is plain HTTP."""
    connection_limit: int = 8192
    """Clients' connections that may be open at once."""


@dataclass(frozen=True, slots=True)
class ShutdownTimes:
    """How long the phases of a shutdown may take."""

    withdraw_seconds: float = 0.0
    """Still taking requests, for load balancers to notice."""
    drain_seconds: float = 30.0
    """Waiting for open answers."""


class GatewayServers:
    def __init__(self, app: FastAPI, sockets: Sockets, drain_seconds: float, access_log: bool = False) -> None:
        grace_seconds = max(1, round(drain_seconds + FAREWELL_SECONDS))
        self._sockets = sockets
        self._metrics = app.state.metrics
        config = _config(app, grace_seconds, access_log, lifespan="on")
        self.public = _QuietServer(config)
        # A second configuration without an access log would silence the first one's: they share uvicorn's logger.
        admin_config = _config(app.state.admin, 1, access_log, lifespan="off")
        self._admin = _QuietServer(admin_config)
        for each in (config, admin_config):
            each.send_timeout_seconds = app.state.send_timeout_seconds
        config.connection_limit = sockets.connection_limit
        config.hosts = app.state.hosts
        if is_loopback(sockets.admin.getsockname()[0]):
            # DNS rebinding would let a browser read the admin port. Elsewhere the port has names of its own.
            admin_config.hosts = app.state.hosts or frozenset()
        config.direct_posts = app.state.direct_posts
        self.tls_listener: TlsListener | None = None
        """Of the public port, where it speaks TLS: the server knows nothing of that."""
        if sockets.tls is not None:
            self.tls_listener = TlsListener(new_context(sockets.tls), sockets.connection_limit, config.make_room)

    async def run(self) -> None:
        background = [
            asyncio.create_task(self._admin.serve(sockets=[self._sockets.admin])),
            asyncio.create_task(self._settle()),
        ]
        public = [self._sockets.public]
        if self._sockets.tls is not None and self.tls_listener is not None:
            keep_up = partial(watch, self._sockets.tls, self.tls_listener.context, self._metrics)
            background.append(asyncio.create_task(run_forever("TLS files", keep_up)))
            background.append(asyncio.create_task(self._accept(self.tls_listener, public.pop())))
        try:
            await self.public.serve(sockets=public)
        finally:
            self._admin.stop()
            for task in background[1:]:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _settle(self) -> None:
        """A full round of the collector over all that a gateway has loaded would hold up every stream."""
        await self._started()
        settle_heap()
        gc.set_threshold(YOUNG_OBJECTS)

    async def _started(self) -> None:
        while not self.public.started and not self._admin.should_exit:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(_START_POLL_SECONDS)

    async def _accept(self, tls_listener: TlsListener, listening: socket.socket) -> None:
        await self._started()
        new_protocol = partial(
            GatewayProtocol, self.public.config, self.public.server_state, self.public.lifespan.state
        )
        await tls_listener.accept(listening, new_protocol, lambda: self.public.should_exit)

    def stop(self) -> None:
        """Stop listening; `run` returns once open answers have ended."""
        self.public.stop()


def _config(app: FastAPI, grace_seconds: int, access_log: bool, lifespan: Literal["on", "off"]) -> BoundedConfig:
    return BoundedConfig(
        app,
        http=GatewayProtocol,
        log_config=None,
        access_log=access_log,
        ws="none",
        server_header=False,
        lifespan=lifespan,
        timeout_graceful_shutdown=grace_seconds,
    )


class Leaving:
    """How a gateway ends: once begun, it is not begun again."""

    def __init__(self, servers: GatewayServers, app: FastAPI, times: ShutdownTimes) -> None:
        self._servers, self._app, self._times = servers, app, times
        self.has_begun = False

    def begin(self, withdraw: bool, why: str) -> None:
        """Say that clients belong elsewhere, and stop listening now or, to `withdraw`, when they have heard of it."""
        if self.has_begun:
            return
        self.has_begun = True
        self._app.state.leave("The gateway is shutting down.")
        wait_seconds = self._times.withdraw_seconds if withdraw else 0.0
        logger.info("leaving %s withdraw=%g s drain=%g s", why, wait_seconds, self._times.drain_seconds)
        asyncio.get_running_loop().call_later(wait_seconds, self._drain)

    def _drain(self) -> None:
        self._servers.stop()
        asyncio.get_running_loop().call_later(self._times.drain_seconds, self._app.state.cut.set)


def serve(app: FastAPI, sockets: Sockets, times: ShutdownTimes, access_log: bool = False) -> None:
    """Serve `app` until a signal, then shut down in these times; raises UserError for unusable TLS files."""
    _allow_open_files()
    _keep_no_large_blocks()
    servers = GatewayServers(app, sockets, times.drain_seconds, access_log)
    try:
        uvloop.run(_serve(app, servers, Leaving(servers, app, times)))
    finally:
        large_work.close()


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keep_no_large_blocks() -> None:
    """Return freed bodies and long texts to the system at once, where its C library is glibc.

    Otherwise glibc would keep freed blocks, up to as much again as is in use, once the first such block was freed.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


async def _serve(app: FastAPI, servers: GatewayServers, leaving: Leaving) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_error)

    def stop(signum: signal.Signals) -> None:
        if leaving.has_begun:
            logger.warning("second signal: ending at once signal=%s", signum.name)
            logging.shutdown()
            os._exit(1)
        leaving.begin(signum is signal.SIGTERM, f"signal={signum.name}")

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    loop.add_signal_handler(DRAIN_SIGNAL, app.state.drain)
    await servers.run()
    logger.info("drained")


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs the type and place of errors that no caller awaits. The loop's own handler would log callbacks' arguments
    and errors' texts."""
    message = str(context.get("message", ""))
    error = context.get("exception")
    shown = _CALLBACK if message.startswith(_CALLBACK) else message
    logger.error("an error that nobody waits for: %s", shown, exc_info=error if error is not None else False)
