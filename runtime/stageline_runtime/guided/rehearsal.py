"""Walks through a grammar before it guides an answer: whether following it takes too long, or comes to nothing.

A grammar that compiles at once may take half a minute for each mask. So the engine, in a process that can be killed,
has some answers written by its rules, of the first, the last and any admitted tokens: ids grow with the length of a
token in most vocabularies, so one walk goes by letters and one by long words. What a walk doesn't come to is bounded
where masks are made (`mask_time`), by the same limits.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from stageline_runtime.guided.json_grammars import first_line
from stageline_runtime.guided.mask_time import CALL_SECONDS, TOKEN_SECONDS

WALK_TOKENS: Final = 24
WALK_SECONDS: Final = 0.1
"""CPU time of one walk, unless it is no more than an answer may go on to use for each token."""
WALKS_SECONDS: Final = 0.4
"""CPU time of all walks after which what was seen has to do; a sensible grammar's take a hundredth."""
_SEED: Final = 1

Choice = Callable[[NDArray[np.int64]], np.int64]
T = TypeVar("T")


class TooSlowError(Exception):
    """Following the grammar takes longer than it may."""


def rehearse(begin: Callable[[], LLMatcher], vocab_size: int, eos_token_ids: Sequence[int]) -> str | None:
    """Why no answer should be held to the grammar whose matchers `begin` makes; None where nothing is against it."""
    chooser, began = random.Random(_SEED), time.thread_time()
    choices: tuple[Choice, ...] = (
        lambda ids: ids[0],
        lambda ids: ids[-1],
        lambda ids: ids[chooser.randrange(len(ids))],
    )
    faults: list[str] = []
    for choose in choices:
        try:
            faults.append(_Walk(begin(), vocab_size, eos_token_ids).fault(choose))
        except TooSlowError as error:
            return f"it takes too long to follow: {error}"
        if time.thread_time() - began > WALKS_SECONDS:
            break
    # A walk says nonsense: one that the library gives up is no more than that, unless all end so.
    return None if "" in faults else f"it is too complex to follow: {first_line(faults[0])}"


class _Walk:
    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._seconds = 0.0

    def fault(self, choose: Choice) -> str:
        """What the library says where it gives up, or nothing. Raises TooSlowError."""
        matcher = self._matcher
        for at in range(WALK_TOKENS):
            bits = self._timed(matcher.compute_bitmask, at)
            admitted = self._admitted(bits)
            if matcher.is_error() or not len(admitted):
                break
            self._timed(partial(matcher.consume_token, int(choose(admitted))), at)
            if matcher.is_stopped():
                break
        return matcher.get_error()

    def _timed(self, call: Callable[[], T], at: int) -> T:
        began = time.thread_time()
        result = call()
        seconds = time.thread_time() - began
        self._seconds += seconds
        if seconds > CALL_SECONDS:
            raise TooSlowError(
                f"{seconds * 1000:.0f} ms of CPU at token {at + 1}, where {CALL_SECONDS * 1000:g} may be"
            )
        if self._seconds > max(WALK_SECONDS, at * TOKEN_SECONDS):
            raise TooSlowError(f"{self._seconds * 1000:.0f} ms of CPU for {at + 1} tokens")
        return result

    def _admitted(self, bits: bytes) -> NDArray[np.int64]:
        """What a walk may go on with."""
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        flags[self._eos_token_ids] = 0
        return flags.nonzero()[0]
