"""Serving until told to stop, then draining: the process's sockets and signals.

The first SIGTERM or SIGINT closes the listening socket and lets open answers finish; those still open when the drain
time is over end with an error event. A second signal ends the process at once.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from stageline_api.errors import UserError

logger = logging.getLogger(__name__)

FAREWELL_SECONDS: Final = 2.0
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


def url_of(listener: socket.socket) -> str:
    """The base URL at which `listener` is reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, listener: socket.socket, drain_seconds: float, access_log: bool = False) -> None:
    """Serve `app` on `listener` until a signal, then drain for at most `drain_seconds`."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=access_log,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds + FAREWELL_SECONDS)),
    )
    asyncio.run(_serve(_SignalFreeServer(config), app, listener, drain_seconds))


async def _serve(server: uvicorn.Server, app: FastAPI, listener: socket.socket, drain_seconds: float) -> None:
    loop = asyncio.get_running_loop()

    def stop(signum: signal.Signals) -> None:
        if server.should_exit:
            logger.warning("second signal: ending at once signal=%s", signum.name)
            logging.shutdown()
            os._exit(1)
        logger.info("draining signal=%s seconds=%g", signum.name, drain_seconds)
        server.should_exit = True
        loop.call_later(drain_seconds, app.state.cut.set)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    await server.serve(sockets=[listener])
    logger.info("drained")
