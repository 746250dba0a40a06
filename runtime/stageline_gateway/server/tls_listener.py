"""Accepts TLS connections: each counts, and its handshake is bounded, from when it is accepted.

The server's own TLS reports a connection only after its handshake, so silent connections would be uncounted and stay a
minute. Here a connection above the limit is dropped at once, unless it can replace an idle one. A connection that
doesn't finish its handshake in time is dropped soon after.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

from stageline_gateway.server.http_protocol import GatewayProtocol
from stageline_gateway.server.listening import BACKLOG

HANDSHAKE_TIMEOUT_SECONDS: Final = 10.0
_LOOK_AGAIN_SECONDS: Final = 0.1
"""For the end of the server; and after an accept that failed, for want of file descriptors for instance."""


class TlsListener:
    """Accepts for one listening socket. `open` holds the connections there are, secure or not yet."""

    def __init__(self, context: ssl.SSLContext, connection_limit: int, make_room: Callable[[], bool]) -> None:
        """`make_room` drops a connection that is not in use, and says whether there was one."""
        self.context = context
        self._connection_limit = connection_limit
        self._make_room = make_room
        self.open: set[socket.socket] = set()
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(
        self, listening: socket.socket, new_protocol: Callable[[], GatewayProtocol], is_over: Callable[[], bool]
    ) -> None:
        """Accept connections until `is_over`; open ones continue after that."""
        listening.setblocking(False)
        listening.listen(BACKLOG)
        accepting = asyncio.create_task(self._accept(listening, new_protocol))
        try:
            while not is_over() and not accepting.done():
                await asyncio.wait([accepting], timeout=_LOOK_AGAIN_SECONDS)
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listening.close()

    async def _accept(self, listening: socket.socket, new_protocol: Callable[[], GatewayProtocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                continue
            if len(self.open) >= self._connection_limit and not self._make_room():
                client.close()
                continue
            self.open.add(client)
            handshake = asyncio.create_task(self._shake_hands(client, new_protocol()))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, client: socket.socket, protocol: GatewayProtocol) -> None:
        leave = partial(self.open.discard, client)
        protocol.on_lost = leave
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, client, ssl=self.context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS
            )
        except OSError:  # includes ssl.SSLError and TimeoutError: peers without TLS aren't logged
            leave()
            client.close()
