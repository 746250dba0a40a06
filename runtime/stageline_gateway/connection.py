"""Work that is worth doing only while its client is there and the gateway may still serve.

The server tells of a client that left by a message on `receive`, not by failing a write, so it is watched for: between
two tokens nothing is written. Whatever ends first decides, and the rest is cancelled before `run_while_connected`
returns, so that a request never outlives its client.
"""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any

from starlette.types import Receive


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
