"""Keeps a watch running that must never end: without it the gateway would silently use stale state.

A watch ends only when it is cancelled. One that fails, by a bug or an unexpected error, is logged and started again
after a pause.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 1.0


async def run_forever(
    name: str, watch: Callable[[], Coroutine[Any, Any, None]], pause_seconds: float = PAUSE_SECONDS
) -> None:
    """Run `watch` again and again until cancelled. `name` is what the log calls it."""
    while True:
        try:
            await watch()
        except Exception:
            logger.exception("the watch over %s failed, and begins again in %g s", name, pause_seconds)
        else:
            logger.error("the watch over %s ended, and begins again in %g s", name, pause_seconds)
        await asyncio.sleep(pause_seconds)
