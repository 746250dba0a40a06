"""The lines of one answer, between the connection that receives them and the reader that consumes them.

`relay` passes all lines of one arrival to its consumer at once, in the call that received them: no task wakes for a
token. Lines that the consumer can't accept yet wait in a short queue, and then their source is paused. A wait ends when
its line arrives, when the answer ends, when the engine has been silent for too long, or when it is interrupted: never
later. A subclass supplies the source of the lines: a connection, or a stream of one.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

Pause = Callable[[], Awaitable[None]]
"""What a taker asks to be awaited before it is given more; begun only then."""
TakeLines = Callable[[list[bytes]], Pause | None]
"""Takes lines, at once."""


LONGEST_TIMER_SECONDS: Final = 30.0
"""Interval of the silence checks. A wait's timer may be set for the longer limit before the first token. With this
interval it is early enough for the shorter limit after that; a new timer would delay the first token."""
BROKE: Final = "The connection to the engine broke."


class ConnectionBrokenError(Exception):
    """The answer can't continue; the text is one sentence for the client."""

    def __init__(self, why: str, is_echo: bool = False) -> None:
        """`is_echo`: another answer on the same connection has already received this end."""
        super().__init__(why)
        self.is_echo = is_echo


class SilentEngineError(Exception):
    """Nothing came for as long as was allowed."""


class IncomingLines(ABC):
    """What a reader sees of an answer; its source calls `bring`."""

    most_waiting = 256
    """Lines that a slow reader may leave here before their source is held."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = float("-inf")
        """When anything of it last came, by the loop's clock."""
        self._lines: list[bytes] = []
        self._is_complete = self._is_held = self._is_stopped = False
        self.has_heard = False
        """Whether anything of this answer came."""
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._silent_since = self._limit_seconds = 0.0
        self._take: TakeLines | None = None
        """Consumes lines while no reader waits for one."""
        self._pause: Pause | None = None
        """What its last call asked to be awaited."""

    @abstractmethod
    def _hold(self) -> None:
        """Stop the source, except for lines that are already on their way."""

    @abstractmethod
    def _go_on(self) -> None:
        """Have them brought again."""

    # Towards the reader

    async def line(self, limit_seconds: float) -> bytes | None:
        """The next line that isn't blank; None at the end."""
        while not self._lines:
            if self._is_complete:
                return None
            await self._arrival(limit_seconds)
        line = self._lines.pop(0)
        self._let_come()
        return line

    async def relay(self, take: TakeLines, limit_seconds: float) -> None:
        """Pass all lines to `take` as they arrive, until the end or `stop`; raises the exceptions of `take`.

        `allow_silence` may change the limit during the call.
        """
        self._limit_seconds = limit_seconds
        while (self._lines or not self._is_complete) and not self._is_stopped:
            if self._lines:
                pause = take(self._taken_lines())
            else:
                self._take = take
                try:
                    await self._arrival(self._limit_seconds)
                finally:
                    self._take = None
                pause, self._pause = self._pause, None
            if pause is not None:
                await pause()

    def allow_silence(self, limit_seconds: float) -> None:
        """From now on, in this wait too, the engine may be silent for so long."""
        self._limit_seconds = limit_seconds
        if self._waiter is not None:
            self._arm(self._silent_since)

    def stop(self) -> None:
        """Have `relay` return: what it handed over last is all that is wanted."""
        self._is_stopped = True

    @property
    def silent_seconds(self) -> float:
        """How long the reader has waited for the next line; 0 when it isn't waiting."""
        return 0.0 if self._waiter is None else self._loop.time() - self._silent_since

    @property
    def is_waited_on(self) -> bool:
        """Whether its reader waits and nothing is unread, so that an interrupt now comes before any further line."""
        return self._waiter is not None and not self._waiter.done()

    def interrupt(self, error: Exception) -> None:
        """End the reader's wait, now or at its next one, with `error`; lines already received are still delivered."""
        self._fail(error)

    def forget_failure(self) -> None:
        """Its reader reads no more. A failure holds the frames that it was raised through, with the request in them,
        and they hold this: none of it would be free before the garbage collector came."""
        self._failure = None

    def _taken_lines(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        if self._is_held:
            self._let_come()
        return lines

    def _let_come(self) -> None:
        if self._is_held and len(self._lines) < self.most_waiting // 2:
            self._is_held = False
            self._go_on()

    async def _arrival(self, limit_seconds: float) -> None:
        """Wait for lines, or for the taker's pause or the end; raises the failure that keeps them from coming."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        self._silent_since, self._limit_seconds = self._loop.time(), limit_seconds
        self._arm(self._silent_since)
        try:
            await self._waiter
        finally:
            self._waiter = None

    # Towards the source

    def bring(self, lines: Sequence[bytes], at: float) -> None:
        """Lines have come `at` that time of the loop's clock; blank ones, or none, say only that their source is there.

        A reader that leaves too much here has its source held.
        """
        self.heard_at, self.has_heard = at, True
        self._lines += [line for line in lines if line]
        if self._take is not None:
            self._silent_since = at
            if self._lines:
                self._hand_over(self._take)
        elif self._lines:
            self._wake()
        if self._is_complete:
            self._wake()
        if len(self._lines) > self.most_waiting and not self._is_held:
            self._is_held = True
            self._hold()

    def _hand_over(self, take: TakeLines) -> None:
        try:
            pause = take(self._taken_lines())
        except Exception as error:
            self._end_wait(error)
            return
        if pause is not None or self._is_stopped:
            self._pause, self._take = pause, None
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._is_complete:
            self._failure = error
            self._end_wait(error)

    def _end_wait(self, error: Exception) -> None:
        """No later line is delivered before the reader has received the error."""
        self._take = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # The time of silence

    def _arm(self, since: float) -> None:
        """Have the timer fire by the end of this wait, and soon enough after `since`, when it was last looked at. One
        that fires earlier is kept, and armed again then."""
        if self._limit_seconds == math.inf:
            return
        due = min(self._silent_since + self._limit_seconds, since + LONGEST_TIMER_SECONDS)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # lines that arrived in the same loop iteration were in time, however late it ran
        if self.silent_seconds >= self._limit_seconds:
            self._fail(SilentEngineError())
        else:
            self._arm(self._loop.time())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
