"""Connections to engines: those used one request after another, and to each engine one that requests share.

A connection goes back when its answer has come to its end; all others are closed, which aborts their requests. Bytes
that nobody asked for close it, too. It rests for seconds only: what an idle connection leads to may be gone, and the
fewer of them there are, the seldomer a request finds out. One that does, before any answer came, is sent again on a new
connection (`generation`). A shared one rests as long. It was asked for with a key, and serves who shows the same.
"""

import asyncio
import math
from collections import deque
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.incoming_lines import ConnectionBrokenError
from stageline_gateway.engine_client.multiplexed import MultiplexedConnection
from stageline_gateway.engine_trust import EngineAddress, EngineTrust

IDLE_SECONDS: Final = 5.0
"""Far less than engines keep a connection (75 s), so that none is used that its engine is about to close."""
MOST_IDLE: Final = 256
"""To one engine."""
APART_SECONDS: Final = 60.0
"""For so long an engine that would not share a connection is not asked for one again."""
END_SECONDS: Final = 1.0
"""How long the end of an answer may come after its last event."""


_Sharing = tuple[EngineAddress, str]
"""An engine, and what authorization it is shown."""


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


class ConnectionPool:
    def __init__(self, connect_seconds: float, trust: EngineTrust, period_seconds: float) -> None:
        """Of a shared connection what came is given out once in `period_seconds` where it is too much."""
        self._connect_seconds = connect_seconds
        self._trust = trust
        self._period_seconds = period_seconds
        self._idle: dict[EngineAddress, deque[tuple[EngineConnection, asyncio.TimerHandle]]] = {}
        self._shared: dict[_Sharing, MultiplexedConnection] = {}
        self._apart_until: dict[EngineAddress, float] = {}
        """When engines that would not share a connection are asked again."""

    async def take(self, engine: EngineAddress, *, is_new: bool = False) -> tuple[EngineConnection, bool]:
        """A connection to `engine`, and whether it was used before; `is_new` asks for one that wasn't.

        Raises as `connect`.
        """
        idle = self._idle.get(engine)
        while idle and not is_new:
            connection, timer = idle.pop()
            timer.cancel()
            connection.on_free = None
            if connection.is_open:
                connection.begin()
                return connection, True
        return await self._connect(engine), False

    def share(self, engine: EngineAddress, authorization: str) -> MultiplexedConnection | None:
        """The connection to `engine` that requests share, open or opening; None where none can be had for now."""
        loop = asyncio.get_running_loop()
        if self._apart_until and self._apart_until.get(engine, 0.0) > loop.time():
            return None
        sharing = engine, authorization
        shared = self._shared.get(sharing)
        if shared is None or not shared.is_open:
            connect, forget = partial(self._connect, engine), partial(self._forget_shared, sharing)
            times = IDLE_SECONDS, forget, self._period_seconds
            shared = MultiplexedConnection(connect, engine.host, authorization, *times)
            self._shared[sharing] = shared
        return shared if shared.has_room else None

    def keep_apart(self, engine: EngineAddress) -> None:
        """It said that it has no connection to share, whatever its status says: something else may stand between."""
        now = asyncio.get_running_loop().time()
        self._apart_until = {each: until for each, until in self._apart_until.items() if until > now}
        self._apart_until[engine] = now + APART_SECONDS

    def _forget_shared(self, sharing: _Sharing, ended: MultiplexedConnection) -> None:
        if self._shared.get(sharing) is ended:
            del self._shared[sharing]

    async def _connect(self, engine: EngineAddress) -> EngineConnection:
        return await connect(engine, self._trust, self._connect_seconds)

    def give_back(self, engine: EngineAddress, connection: EngineConnection, *, ended_well: bool) -> None:
        """Keep a connection whose answer has been read to its end, or soon will be; close any other."""
        if connection.is_free:
            self._keep(engine, connection)
        elif ended_well and connection.is_open and not connection.is_complete:
            timer = asyncio.get_running_loop().call_later(END_SECONDS, connection.close)
            connection.on_free = partial(self._has_ended, engine, connection, timer)
        else:
            connection.close()

    def close(self) -> None:
        """Close those that rest, and those that are shared."""
        for idle in self._idle.values():
            for connection, timer in idle:
                timer.cancel()
                connection.close()
        self._idle.clear()
        for shared in tuple(self._shared.values()):
            shared.close()

    def _has_ended(self, engine: EngineAddress, connection: EngineConnection, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        connection.on_free = None
        self.give_back(engine, connection, ended_well=False)

    def _keep(self, engine: EngineAddress, connection: EngineConnection) -> None:
        idle = self._idle.setdefault(engine, deque())
        if len(idle) >= MOST_IDLE:
            connection.close()
            return
        forget = partial(self._forget, engine, connection)
        connection.rest(forget)
        idle.append((connection, asyncio.get_running_loop().call_later(IDLE_SECONDS, forget)))

    def _forget(self, engine: EngineAddress, connection: EngineConnection) -> None:
        """It has rested for too long, or its engine ended it."""
        idle = self._idle.get(engine, deque())
        for entry in tuple(idle):
            if entry[0] is connection:
                idle.remove(entry)
                entry[1].cancel()
        if not idle:
            self._idle.pop(engine, None)
        connection.on_free = None
        connection.close()
