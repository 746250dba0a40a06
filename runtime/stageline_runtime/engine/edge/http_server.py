"""The engine's HTTP server, for as long as a block runs. It leaves signals alone: the engine drains its group first."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_runtime.termination import RuntimeFailure


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn: leave signals to the engine."""
        yield


@contextlib.asynccontextmanager
async def serving(app: FastAPI, host: str, *, linger_seconds: int) -> AsyncIterator[None]:
    """Answer on the engine's port of `host`; at the end, clients have `linger_seconds` to read their streams.

    Raises:
        RuntimeFailure: the port can't be listened on.
    """
    settings = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=linger_seconds)
    server = _Server(settings)
    serves = asyncio.create_task(server.serve(sockets=[_listen(host)]))
    try:
        yield
    finally:
        server.should_exit = True
        await serves


def _listen(host: str) -> socket.socket:
    try:
        listener = socket.create_server((host, ports.ENGINE_HTTP), backlog=2048)
    except OSError as error:
        detail = f"can't listen on {host}:{ports.ENGINE_HTTP}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
    # Accepted connections inherit it; without it a streamed token may wait 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
