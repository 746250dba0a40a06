"""Connections to engines: new ones for short requests, and shared ones for generations.

Requests to an engine share one connection. Long requests share a second one, since their lines would delay the others.
Another is opened while an engine leaves a megabyte unread. A connection stays idle for seconds only: its engine may be
gone, and fewer idle connections mean fewer requests that fail on one. Such a request, if no answer has arrived, is sent
again on a new connection (`generation`). Each connection was opened with a key, and serves requests with the same key.
"""

import asyncio
import math
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.incoming_lines import ConnectionBrokenError
from stageline_gateway.engine_client.multiplexed import MultiplexedConnection
from stageline_gateway.engine_trust import EngineAddress, EngineTrust

IDLE_SECONDS: Final = 5.0
"""Far less than engines keep a connection (75 s), so that none is used that its engine is about to close."""


class _Use(NamedTuple):
    """What a connection is for; requests of the same use share it."""

    engine: EngineAddress
    authorization: str
    is_long: bool


async def connect(engine: EngineAddress, trust: EngineTrust, limit_seconds: float | None) -> EngineConnection:
    """A new connection.

    Raises OSError (TimeoutError among them) when there is none to be had, and ValueError for a URL that is none.
    """
    parts = urlsplit(engine.url)
    if parts.scheme != ("https" if engine.tls_name else "http") or not parts.hostname:
        raise ValueError(engine.url)
    async with asyncio.timeout(limit_seconds):
        _, connection = await asyncio.get_running_loop().create_connection(
            EngineConnection,
            parts.hostname,
            parts.port or (443 if engine.tls_name else 80),
            ssl=trust.context if engine.tls_name else None,
            server_hostname=engine.tls_name or None,
        )
    return connection


async def get(trust: EngineTrust, engine: EngineAddress, path: str, authorization: str) -> bytes:
    """The body of the answer to a GET, whatever its status, on a new connection: an old one may lead nowhere any more.

    Raises as `connect`, and OSError where the connection breaks: before the answer's end, which its head must tell, or
    at a line of more than `LINE_LIMIT_BYTES`.
    """
    connection = await connect(engine, trust, None)
    try:
        connection.get(engine.host, path, authorization)
        await connection.head(math.inf)
        return await connection.body(math.inf)
    except ConnectionBrokenError as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()
        connection.forget_failure()


class EngineConnections:
    def __init__(self, connect_seconds: float, trust: EngineTrust) -> None:
        self._connect_seconds = connect_seconds
        self._trust = trust
        self._shared: dict[_Use, list[MultiplexedConnection]] = {}

    def share(self, engine: EngineAddress, authorization: str, *, is_long: bool) -> MultiplexedConnection:
        """A connection to `engine`, open or opening, for requests that are long or aren't."""
        use = _Use(engine, authorization, is_long)
        shared = self._shared.setdefault(use, [])
        found = next((each for each in shared if each.is_open and each.has_room), None)
        if found is None:
            connect_to = partial(connect, engine, self._trust, self._connect_seconds)
            found = MultiplexedConnection(
                connect_to, engine.host, authorization, IDLE_SECONDS, partial(self._forget, use)
            )
            shared.append(found)
        return found

    def close(self) -> None:
        for shared in tuple(self._shared.values()):
            for each in tuple(shared):
                each.close()

    def _forget(self, use: _Use, ended: MultiplexedConnection) -> None:
        shared = self._shared.get(use, [])
        if ended in shared:
            shared.remove(ended)
        if not shared:
            self._shared.pop(use, None)
