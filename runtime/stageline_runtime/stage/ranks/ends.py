"""Which end of a rank is the stage's: the failure that no other explains, reported with the stage and the rank. Pure.

A rank that waits for a lost rank ends too, and so does one with a watchdog that found another late: their messages
point at the failed one.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stageline_api.failures import CONSEQUENCES, FailureClass, TerminationMessage

_OF_NO_RANK: Final = CONSEQUENCES | {FailureClass.BAD_CONFIG, FailureClass.EVICTED}
"""Classes about another stage, the engine or the model's configuration, whichever rank reports them."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended without its supervisor's action."""

    rank: int
    status: int
    """Its exit status, negative for a signal."""
    words: TerminationMessage | None
    """What it left."""
    is_out_of_memory: bool = False
    """Whether the kernel has ended processes of this container for want of memory."""

    @property
    def is_failure(self) -> bool:
        return self.status != 0


def last_words_of(stage: int, ends: Sequence[RankEnd]) -> TerminationMessage | None:
    """What the stage says, from its ranks' ends in the order in which they came; None: it was ended before it began."""
    failures = {end.rank: _words(stage, end) for end in ends if end.is_failure}
    causes = {rank: words for rank, words in failures.items() if words.failure_class not in CONSEQUENCES}
    told = causes or failures
    if told:
        rank, words = next(iter(told.items()))
        if words.rank is not None and words.rank in causes:
            rank, words = words.rank, causes[words.rank]
        return _with_rank(words, rank)
    return next((end.words for end in ends if end.words is not None), None)


def _words(stage: int, end: RankEnd) -> TerminationMessage:
    if end.words is not None:
        return end.words
    if end.status < 0 and end.is_out_of_memory:
        failure_class, how = FailureClass.OUT_OF_MEMORY, "ended by the kernel: the container is out of memory"
    elif end.status < 0:
        failure_class, how = FailureClass.KILLED, f"ended by {_name_of(-end.status)}"
    else:
        failure_class, how = FailureClass.INTERNAL, f"ended with status {end.status} and no last words"
    return TerminationMessage(
        failure_class=failure_class, stage=stage, rank=end.rank, detail=f"rank {end.rank} was {how}"
    )


def _with_rank(words: TerminationMessage, rank: int) -> TerminationMessage:
    """Add `rank` to a message, unless it names another rank, or reports none that failed."""
    if words.failure_class in _OF_NO_RANK:
        return words.model_copy(update={"rank": None})
    if words.failure_class is FailureClass.RENDEZVOUS_TIMEOUT:
        return words  # the reporting rank is alive: the lost one is named, or not known
    return words if words.rank is not None else words.model_copy(update={"rank": rank})


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
