"""Sockets that clients and operators connect to."""

import socket
from typing import Final

from stageline_api.errors import UserError

BACKLOG: Final = 2048


def bind(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port` (0 picks a free port); raises UserError when that can't be done."""
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"The gateway can't listen on {host}:{port}: {reason}. Choose another with --host and --port."
        raise UserError(message) from None
    _send_at_once(listener)
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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _send_at_once(listener: socket.socket) -> None:
    # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these don't; without
    # it a small write waits up to 40 ms for the acknowledgement of the one before, once per streamed token.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
