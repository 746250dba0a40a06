"""Serving until a signal, then draining: the process's sockets and signals.

The first SIGTERM makes the admin port say that clients belong elsewhere, and only then, when load balancers had the
time to hear of it, closes the listening socket and lets open answers finish; those still open when the drain time is
over end with an error event. SIGINT, which a person sends, leaves out the wait. A second signal ends the process at
once.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from stageline_api.errors import UserError
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.server.http_protocol import BoundedConfig, GatewayProtocol
from stageline_gateway.server.loop_errors import log_loop_error
from stageline_gateway.server.tls import TlsFiles, new_context, watch
from stageline_gateway.server.tls_listener import TlsListener

logger = logging.getLogger(__name__)

OPEN_FILES: Final = 65536
"""Each connection is one, to a client or to an engine; many systems allow 1024 until they are asked."""
_START_POLL_SECONDS: Final = 0.01
FAREWELL_SECONDS: Final = 5.0
"""How long answers that were cut have to send their error event."""


class _SignalFreeServer(uvicorn.Server):
    """uvicorn re-raises the signal that stopped it, which would make a clean drain look like a crash."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port` (0 picks a free port); raises UserError when that can't be done."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"The gateway can't listen on {host}:{port}: {reason}. Choose another with --host and --port."
        raise UserError(message) from None
    # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these don't; without
    # it a small write waits up to 40 ms for the acknowledgement of the one before, once per streamed token.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def bind_near(host: str, port: int) -> socket.socket:
    """Listen on `port`, or on a free port where that is taken; raises UserError when there is none."""
    try:
        return bind(host, port)
    except UserError:
        return bind(host, 0)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
        config.connection_limit = sockets.connection_limit
        self.public = _SignalFreeServer(config)
        # A second configuration without an access log would silence the first one's: they share uvicorn's logger.
        self._admin = _SignalFreeServer(_config(app.state.admin, 1, access_log, lifespan="off"))
        for each in (config, self._admin.config):
            cast(BoundedConfig, each).send_timeout_seconds = app.state.send_timeout_seconds
        config.hosts = app.state.hosts
        # With a log of accesses by way of what puts the client of a trusted proxy there.
        config.direct_posts = {} if access_log else app.state.direct_posts
        self.tls_listener: TlsListener | None = None
        """Of the public port, where it speaks TLS: the server knows nothing of that."""
        if sockets.tls is not None:
            self.tls_listener = TlsListener(new_context(sockets.tls), sockets.connection_limit, config.make_room)

    async def run(self) -> None:
        background = [asyncio.create_task(self._admin.serve(sockets=[self._sockets.admin]))]
        public = [self._sockets.public]
        if self._sockets.tls is not None and self.tls_listener is not None:
            keep_up = partial(watch, self._sockets.tls, self.tls_listener.context, self._metrics)
            background.append(asyncio.create_task(run_forever("TLS files", keep_up)))
            background.append(asyncio.create_task(self._accept(self.tls_listener, public.pop())))
        try:
            await self.public.serve(sockets=public)
        finally:
            self._admin.should_exit = True
            for task in background[1:]:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _accept(self, tls_listener: TlsListener, listening: socket.socket) -> None:
        while not self.public.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(_START_POLL_SECONDS)
        new_protocol = partial(
            GatewayProtocol, self.public.config, self.public.server_state, self.public.lifespan.state
        )
        await tls_listener.accept(listening, new_protocol, lambda: self.public.should_exit)

    def stop(self) -> None:
        """Stop listening; `run` returns once open answers have ended."""
        self.public.should_exit = True


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


def serve(app: FastAPI, sockets: Sockets, times: ShutdownTimes, access_log: bool = False) -> None:
    """Serve `app` until a signal, then shut down in these times; raises UserError for unusable TLS files."""
    _allow_open_files()
    servers = GatewayServers(app, sockets, times.drain_seconds, access_log)
    uvloop.run(_serve(servers, app, times))


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(servers: GatewayServers, app: FastAPI, times: ShutdownTimes) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_error)
    signals: list[signal.Signals] = []

    def stop(signum: signal.Signals) -> None:
        signals.append(signum)
        if len(signals) > 1:
            logger.warning("second signal: ending at once signal=%s", signum.name)
            logging.shutdown()
            os._exit(1)
        app.state.leave("The gateway is shutting down.")
        wait_seconds = times.withdraw_seconds if signum is signal.SIGTERM else 0.0
        logger.info("leaving signal=%s withdraw=%g s drain=%g s", signum.name, wait_seconds, times.drain_seconds)
        loop.call_later(wait_seconds, drain)

    def drain() -> None:
        servers.stop()
        loop.call_later(times.drain_seconds, app.state.cut.set)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    await servers.run()
    logger.info("drained")
