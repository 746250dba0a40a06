"""Connections to the plan bus whose other end has not shown who it is: few, soon over, and never heard at length."""

import asyncio

from stageline_runtime.plan_bus.bus import EngineBusConnection, encode_frame
from stageline_runtime.plan_bus.challenge import GREETING_SECONDS, MOST_STRANGERS, new_nonce
from stageline_runtime.plan_bus.messages import Challenge


class Strangers:
    """Challenges each connection, and gives those up that don't answer."""

    def __init__(self) -> None:
        self._nonces: dict[EngineBusConnection, tuple[str, asyncio.TimerHandle]] = {}

    def greet(self, connection: EngineBusConnection) -> None:
        if len(self._nonces) >= MOST_STRANGERS:
            connection.close()
            return
        nonce = new_nonce()
        overdue = asyncio.get_running_loop().call_later(GREETING_SECONDS, connection.close)
        self._nonces[connection] = (nonce, overdue)
        connection.send_frame(encode_frame(Challenge(nonce)))

    def forget(self, connection: EngineBusConnection) -> str:
        """It has answered, or is gone; returns what it was challenged with, nothing for one that wasn't."""
        nonce, overdue = self._nonces.pop(connection, ("", None))
        if overdue is not None:
            overdue.cancel()
        return nonce
