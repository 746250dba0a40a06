"""Limits for unauthenticated connections to the plan bus: in number, time and frame size."""

import asyncio
import logging
import time
from typing import Final

from stageline_runtime.plan_bus.bus import EngineBusConnection, encode_frame
from stageline_runtime.plan_bus.challenge import GREETING_SECONDS, MOST_STRANGERS, new_nonce
from stageline_runtime.plan_bus.messages import Challenge

logger = logging.getLogger(__name__)

LINES_AT_ONCE: Final = 20
SECONDS_PER_LINE: Final = 10.0
"""How much strangers may fill the log: so many lines at first, then one in this time."""


class Strangers:
    """Challenges each connection, and gives those up that don't answer."""

    def __init__(self) -> None:
        self._lines, self._told_at, self._untold = float(LINES_AT_ONCE), time.monotonic(), 0
        self._nonces: dict[EngineBusConnection, tuple[str, asyncio.TimerHandle]] = {}

    def greet(self, connection: EngineBusConnection) -> None:
        if len(self._nonces) >= MOST_STRANGERS:
            connection.close()
            return
        nonce = new_nonce()
        overdue = asyncio.get_running_loop().call_later(GREETING_SECONDS, connection.close)
        self._nonces[connection] = (nonce, overdue)
        connection.send_frame(encode_frame(Challenge(nonce)))

    def tell(self, refusal: str) -> None:
        """Log why one was refused, unless there have been many."""
        now = time.monotonic()
        self._lines = min(LINES_AT_ONCE, self._lines + (now - self._told_at) / SECONDS_PER_LINE)
        self._told_at = now
        if self._lines < 1:
            self._untold += 1
            return
        self._lines -= 1
        logger.warning("%s%s", refusal, f" (and {self._untold} others before)" if self._untold else "")
        self._untold = 0

    def forget(self, connection: EngineBusConnection) -> str:
        """It has answered, or is gone; returns its challenge, empty if it had none."""
        nonce, overdue = self._nonces.pop(connection, ("", None))
        if overdue is not None:
            overdue.cancel()
        return nonce
