"""Accounts that may wait: once a second all answers tell at once what was written of them, a few in a turn of the loop.

What a token costs is what is touched for it, since the caches are empty when it comes. So an answer that may only notes
a token, and is accounted for in the next round with all others, by code that is there by then. A round is a turn for
each few answers, so that nobody's token waits for it. `bring_up_to_date` leaves nothing of one engine's answers: what
happens to it then is judged by all that was written before.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable
from itertools import chain, islice
from typing import Final

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
"""Prometheus looks no oftener."""
MOST_IN_A_TURN: Final = 8
"""Answers, of 30 µs each or so."""

Account = Callable[[], None]
"""Accounts for what waits; for nothing where that was done meanwhile."""


class LateAccounts:
    """For one event loop, and its thread."""

    def __init__(self, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._waiting: dict[Hashable, dict[Account, None]] = {}
        """By engine."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, engine: Hashable, account: Account) -> None:
        """Call `account`, of an answer of `engine`, within a period or so."""
        self._waiting.setdefault(engine, {})[account] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_seconds, self._begin_round)

    def discard(self, engine: Hashable, account: Account) -> None:
        """It is not to be called any more, and what it holds is let go."""
        waiting = self._waiting.get(engine, {})
        waiting.pop(account, None)
        if not waiting:
            self._waiting.pop(engine, None)

    def bring_up_to_date(self, engine: Hashable) -> None:
        """Account for all that waits of this engine's answers now."""
        for account in tuple(self._waiting.get(engine, ())):
            self._call(engine, account)

    def _begin_round(self) -> None:
        self._timer = None
        self._go_on(sum(map(len, self._waiting.values())))

    def _go_on(self, left: int) -> None:
        """`left`: how many of this round; whoever comes meanwhile has a round of their own."""
        waiting = chain.from_iterable(((engine, one) for one in all_of) for engine, all_of in self._waiting.items())
        for engine, account in tuple(islice(waiting, min(left, MOST_IN_A_TURN))):
            self._call(engine, account)
        if left > MOST_IN_A_TURN:
            asyncio.get_running_loop().call_soon(self._go_on, left - MOST_IN_A_TURN)

    def _call(self, engine: Hashable, account: Account) -> None:
        self.discard(engine, account)
        try:
            account()
        except Exception as error:  # a bug; the others' accounts are to be right all the same
            logger.exception("a bug in the gateway: %s", type(error).__name__)
