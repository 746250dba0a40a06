"""How much CPU time following grammars may take of steps that others wait for.

The library bounds a mask by what it counts, not by time: an ambiguous grammar of a few KiB takes half a minute for it.
So each call has a limit of CPU time, the least of three: what one call may take, what is left to its answer, and what
is left to all answers of this process. The last two fill up again, with the answer's tokens and with the clock. Where
all have used up theirs, a call may still take what sensible grammars need several times over: only dear ones end.
Seconds of CPU throughout, so that a busy machine ends nobody's answer.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

CALL_SECONDS: Final = 0.04
"""Of one call; masks of sensible grammars and schemas take up to a millisecond, over 49,152 tokens."""
ANSWER_SECONDS: Final = 0.15
"""What an answer may be ahead of `TOKEN_SECONDS` for each of its tokens."""
TOKEN_SECONDS: Final = 0.002
FOLLOWED_SECONDS: Final = 0.000_02
"""Of each token followed, beside the limits: an answer that comes back has thousands at once."""
SHARED_SECONDS: Final = 0.08
"""What the answers of one process may use at once, together."""
SHARED_SHARE: Final = 0.3
"""Of the time between calls, which fills that up again."""
SURE_SECONDS: Final = 0.003
"""What each call may take, whatever others have used."""
MOST_OVERRUNS: Final = 2
"""Calls for one grammar that used up less than `CALL_SECONDS`, after which it counts as one that takes too long."""
AVOIDED_SECONDS: Final = 60.0
"""For how long nobody's answer is held to such a grammar."""


class GrammarVerdict:
    """Whether a grammar takes too long, from what its answers came to; they share it, so that many cost what few do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_overruns = 0
        self._avoided_until = -math.inf

    @property
    def is_too_slow(self) -> bool:
        return self._clock() < self._avoided_until

    def overran(self, limit_seconds: float) -> None:
        """A call took longer than that. With less than a whole call's time that may have been the others' doing."""
        self._num_overruns += 1
        if limit_seconds >= CALL_SECONDS or self._num_overruns >= MOST_OVERRUNS:
            self._num_overruns = 0
            self._avoided_until = self._clock() + AVOIDED_SECONDS


class SharedMaskTime:
    """What the answers of one process may use. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left = SHARED_SECONDS
        self._filled_at = clock()

    @property
    def left(self) -> float:
        with self._lock:
            now = self._clock()
            self._left = min(SHARED_SECONDS, self._left + (now - self._filled_at) * SHARED_SHARE)
            self._filled_at = now
            return self._left

    def use(self, seconds: float) -> None:
        with self._lock:
            # What calls surely may take is no debt: it would outlast the ones who made it.
            self._left = max(0.0, self._left - seconds)
            # Nor does what a call itself lasts fill anything up: on a busy machine one step would go on and on.
            self._filled_at = self._clock()


class AnswerMaskTime:
    """What one answer may use."""

    def __init__(self, shared: SharedMaskTime | None = None) -> None:
        self._shared = SharedMaskTime() if shared is None else shared
        self._left = ANSWER_SECONDS

    @property
    def left(self) -> float:
        """What the next call may take; none may be made where that is not above zero."""
        return min(CALL_SECONDS, max(SURE_SECONDS, self._shared.left), self._left)

    def use(self, seconds: float, num_tokens: int = 0) -> None:
        """A call that followed `num_tokens` took so long."""
        used = max(0.0, seconds - granted(num_tokens))
        self._shared.use(used)
        self._left = min(ANSWER_SECONDS, self._left + num_tokens * TOKEN_SECONDS - used)


def granted(num_tokens: int) -> float:
    """What following so many tokens may take beside."""
    return num_tokens * FOLLOWED_SECONDS
