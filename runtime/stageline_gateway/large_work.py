"""The one thread for what would hold the event loop up: large bodies and answers, read, checked and written.

Such work is Python's, so of several threads at it only one runs, and each has the loop wait for the interpreter's lock
once more: what each does to the tokens of others adds up. In one thread they wait for each other. Between two of them
the loop has its turn, and whoever's turn it is may then still be refused.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

QUICK_BYTES: Final = 64 * 1024
"""What has up to this many bytes is parsed and checked in a millisecond or two."""
THREAD_NAME: Final = "large-work"
Made = TypeVar("Made")


def _nothing() -> None:
    pass


class _Turns:
    """Of one event loop's work."""

    def __init__(self) -> None:
        self.now = asyncio.Lock()
        self.begun_next = asyncio.Lock()


class LargeWork:
    """Its thread begins with the first work."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()

    async def run(self, work: Callable[[], Made], before: Callable[[], None] = _nothing, begins: bool = False) -> Made:
        """What `work` makes, and raises, in the thread.

        `before` is called in the loop when the turn has come; what that raises is raised here, and nothing is done.
        Where `work` begins a request's, what goes on with others', which hold more, waits for at most one such.
        """
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(loop, _Turns())
        async with turns.begun_next if begins else nullcontext(), turns.now:
            before()
            return await loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        """Wait for what is being done; what hasn't begun is given up. Nothing can be run afterwards."""
        self._thread.shutdown(cancel_futures=True)


large_work: Final = LargeWork()
"""This process's."""


async def off_the_loop(
    size_bytes: int, work: Callable[[], Made], before: Callable[[], None] = _nothing, begins: bool = False
) -> Made:
    """`work` on so many bytes: here when that is quick, else in the thread, so that streams go on meanwhile."""
    if size_bytes > QUICK_BYTES:
        return await large_work.run(work, before, begins)
    before()
    return work()
