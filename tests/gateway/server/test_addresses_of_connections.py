"""Both ends of a connection are told as uvicorn tells them, which asks the socket and not the transport."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from stageline_gateway.server.http_protocol import BoundedConfig, GatewayProtocol


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def empty(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_ends_of_a_connection_are_told(run: Callable[..., None], host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6: ip -6 addr add ::1/128 dev lo")

    async def connect() -> None:
        config = BoundedConfig(empty, http=GatewayProtocol, lifespan="off", log_level="warning")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: GatewayProtocol(config, state, {}), host, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            [made] = state.connections
            assert isinstance(made, GatewayProtocol)
            own = writer.get_extra_info("sockname")[:2]
            assert (made.server, made.client, made.scheme) == ((host, port), own, "http")
            assert (made.server, made.client) == (get_local_addr(made.transport), get_remote_addr(made.transport))
            writer.close()

    run(connect())
