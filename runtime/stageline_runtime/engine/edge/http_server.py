"""The engine's two HTTP servers, for as long as a block runs. They leave signals alone: the engine drains first."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.http_connection import HttpConnection
from stageline_runtime.termination import RuntimeFailure

IDLE_SECONDS = 75
"""How long a connection may stay idle: longer than the gateway keeps one (30 s), so that the gateway closes it first
and never sends on a connection that is closing."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn: leave signals to the engine."""
        yield


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI,
    state_app: FastAPI,
    host: str,
    *,
    linger_seconds: int,
    before_end: Callable[[], None],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve the engine's two ports of `host`; at the end, clients have `linger_seconds` to read their streams.

    `before_end` is called first then, to end connections that would stay open without traffic.

    With `tls` the first port serves HTTPS. The second, for probes and metrics, never does: it carries no prompt,
    token or key, and its scrapers have no certificates.

    Raises:
        RuntimeFailure: a port can't be listened on.
    """
    with contextlib.ExitStack() as listening:
        listeners = [listening.enter_context(_listen(host, port)) for port in (ports.ENGINE_HTTP, ports.ENGINE_STATE)]
        pairs = ((app, tls), (state_app, None))
        servers = [_Server(server_settings(each, linger_seconds, context)) for each, context in pairs]
        serve = [server.serve(sockets=[each]) for server, each in zip(servers, listeners, strict=True)]
        serving = asyncio.gather(*serve)
        try:
            yield
        finally:
            before_end()
            for server in servers:
                server.should_exit = True
            await serving


def server_settings(app: FastAPI, linger_seconds: int, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """Of one port."""
    settings = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=linger_seconds,
        timeout_keep_alive=IDLE_SECONDS,
    )
    settings.load()
    settings.ssl = tls  # uvicorn itself would read files, and once only
    return settings


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        detail = f"can't listen on {host}:{port}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
    # Accepted connections inherit it; without it a streamed token may wait 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
