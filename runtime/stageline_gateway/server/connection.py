"""Work that is worth doing only while its client is there, reads, and the gateway may still serve.

The server tells of a client that left by a message on `receive`, not by failing a write, so it is watched for: between
two tokens nothing is written. Whatever ends first decides, and the rest is cancelled before `run_while_connected`
returns, so that a request never outlives its client.
"""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

ABORT_EXTENSION: Final = "stageline.abort"
"""Name in an ASGI scope's `extensions` of a function that drops the connection and what it holds unsent."""


class SlowReaderError(Exception):
    """The client has left its end of the connection full for too long."""


class Ending(Enum):
    """Which of the three came first."""

    FINISHED = "finished"
    CLIENT_GONE = "client gone"
    CUT = "cut"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive, cut: asyncio.Event) -> Ending:
    """Run `work` to its end unless the client leaves or `cut` is set first. Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    stopped = asyncio.ensure_future(cut.wait())
    everything: tuple[asyncio.Future[Any], ...] = (task, gone, stopped)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return Ending.FINISHED
        return Ending.CLIENT_GONE if gone.done() else Ending.CUT
    finally:
        for one in everything:
            one.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


def patient_send(send: Send, timeout_seconds: float) -> Send:
    """`send` that raises SlowReaderError when the client doesn't make room within `timeout_seconds`.

    The server lets a send wait while more than a fixed amount is unsent, so an answer never piles up in memory.
    """

    async def bounded(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                await send(message)
        except TimeoutError:
            raise SlowReaderError from None

    return bounded


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drop the client's connection and wait until it is gone: closing it would wait for the client to read."""
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
        await _disconnected(receive)
