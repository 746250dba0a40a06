"""Sockets that clients and operators connect to. Imports nothing that serves.

Of several workers each has sockets of its own on one address (SO_REUSEPORT), among which the kernel divides new
connections. Their address is first listened on without it, since that option
would hide somebody else there: two gateways on one port would each get a part of the other's clients.
"""

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


def shareable(listener: socket.socket) -> socket.socket:
    """The address of a listener that is alone there, held for workers; nothing listens there until they do.

    Raises:
        UserError: somebody else took it meanwhile.
    """
    address = listener.getsockname()
    listener.close()
    try:
        return _beside(address)
    except OSError as error:
        raise UserError(f"The gateway can't listen on {address[0]}:{address[1]}: {error.strerror}.") from None


def worker_socket(held: socket.socket) -> socket.socket:
    """A worker's own socket on a shareable address. Connections come to it once it listens."""
    mine = _beside(held.getsockname())
    _send_at_once(mine)
    return mine


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _beside(address: tuple[str, int]) -> socket.socket:
    made = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _send_at_once(listener: socket.socket) -> None:
    # Inherited by each connection. asyncio sets it only on sockets that name their protocol, which these don't; without
    # it a small write waits up to 40 ms for the acknowledgement of the one before, once per streamed token.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
