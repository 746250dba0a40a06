"""Accounts that may wait: once a second all answers tell at once what was written of them, a few in a turn of the loop.

What a token costs is what is touched for it, since the caches are empty when it comes. So an answer that may only notes
a token, and is accounted for in the next round with all others, by code that is there by then. A round is a turn for
each few answers, so that nobody's token waits for it. `bring_up_to_date` leaves nothing that waits: what happens then
is judged by all that was written before it.
"""

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
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
        self._waiting: dict[Account, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, account: Account) -> None:
        """Call `account` within a period or so."""
        self._waiting[account] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_seconds, self._begin_round)

    def discard(self, account: Account) -> None:
        """It is not to be called any more, and what it holds is let go."""
        self._waiting.pop(account, None)

    def bring_up_to_date(self) -> None:
        """Account for everything now."""
        self._account(len(self._waiting))

    def _begin_round(self) -> None:
        self._timer = None
        self._go_on(len(self._waiting))

    def _go_on(self, left: int) -> None:
        """`left`: how many of this round; whoever comes meanwhile has a round of their own."""
        self._account(min(left, MOST_IN_A_TURN))
        if left > MOST_IN_A_TURN:
            asyncio.get_running_loop().call_soon(self._go_on, left - MOST_IN_A_TURN)

    def _account(self, most: int) -> None:
        for account in tuple(islice(self._waiting, most)):
            self.discard(account)
            try:
                account()
            except Exception as error:  # a bug; the others' accounts are to be right all the same
                logger.exception("a bug in the gateway: %s", type(error).__name__)
