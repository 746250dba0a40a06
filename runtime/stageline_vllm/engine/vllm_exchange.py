"""One POST to vLLM's server on its own connection; it delivers the answer line by line as it arrives.

Uses a bare protocol, because every token of every answer passes here: a line is processed in the turn that read it,
without waking a task. Closing the exchange breaks the connection, which aborts the request inside vLLM.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Self, cast

from stageline_vllm.engine.response_reader import ResponseError, ResponseReader


class VllmUnreachableError(Exception):
    """vLLM's server was not reached, or the connection broke before the answer's end; a sentence about it."""


class VllmExchange(asyncio.Protocol):
    """`open`, `post`, await `ended`; `close` in any case."""

    def __init__(self, take_line: Callable[[int, bytes], None]) -> None:
        """`take_line` receives the status and one line; its exceptions end the exchange."""
        self._take_line = take_line
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, host: str, port: int, take_line: Callable[[int, bytes], None]) -> Self:
        """Connect.

        Raises:
            VllmUnreachableError: the server doesn't accept the connection.
        """
        try:
            _, exchange = await asyncio.get_running_loop().create_connection(lambda: cls(take_line), host, port)
        except OSError as error:
            raise VllmUnreachableError(f"vLLM's server at {host}:{port} can't be reached") from error
        return exchange

    def post(self, host: str, path: str, authorization: str, body: bytes) -> None:
        assert self._transport is not None, "not connected"
        fields = f"host: {host}\r\nauthorization: {authorization}\r\ncontent-type: application/json"
        fields += f"\r\ncontent-length: {len(body)}\r\nconnection: close"
        self._transport.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)

    async def ended(self) -> int:
        """Wait for the answer's end; returns its status.

        Raises:
            VllmUnreachableError: the connection broke before it, or the server does not speak HTTP.
        """
        await self._ended
        return self._reader.status

    def finish(self) -> None:
        """The caller needs no more data: `ended` returns, and the rest is not read."""
        self._end(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._read(lambda: self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        self._read(self._reader.end)
        self._end(VllmUnreachableError("vLLM's server closed the connection before the answer's end"))

    def _read(self, lines: Callable[[], list[bytes]]) -> None:
        if self._ended.done():
            return
        try:
            for line in lines():
                if self._ended.done():
                    return
                self._take_line(self._reader.status, line)
        except ResponseError as error:
            self._end(VllmUnreachableError(str(error)))
        except Exception as error:
            self._end(error)
        if self._reader.is_complete:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
        self.close()
