"""Merges what the ranks of the last stage report of one plan. Pure.

Where requests belong to one rank each, every rank of the last stage samples its own rows, and a plan is done when all
of them have reported it. Each rank answers plans in order, so plans are done in order too. What a rank has drafted
after a plan is kept until then, as drafts follow tokens that must be known.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stageline_runtime.plan_bus.messages import Drafted, StepDone


@dataclass(slots=True)
class _Answered:
    """A plan that some ranks have yet to answer."""

    done: list[StepDone] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)


class RankResults:
    """Passes a plan's results on when the last of `ranks` ranks has reported them."""

    def __init__(
        self, ranks: int, on_step_done: Callable[[StepDone], None], on_drafted: Callable[[Drafted], None]
    ) -> None:
        self._ranks = ranks
        self._on_step_done, self._on_drafted = on_step_done, on_drafted
        self._waiting: dict[int, _Answered] = {}

    def step_done(self, done: StepDone) -> None:
        """One rank's part of a plan's results."""
        waiting = self._waiting.setdefault(done.seq, _Answered())
        waiting.done.append(done)
        if len(waiting.done) < self._ranks:
            return
        del self._waiting[done.seq]
        rows = tuple(row for part in waiting.done for row in part.rows)
        self._on_step_done(StepDone(done.seq, rows, tuple(each for part in waiting.done for each in part.reports)))
        for drafted in waiting.drafted:
            self._on_drafted(drafted)

    def drafted(self, drafted: Drafted) -> None:
        """One rank's drafts; it has reported the plan's tokens before."""
        if (waiting := self._waiting.get(drafted.seq)) is not None:
            waiting.drafted.append(drafted)
        else:
            self._on_drafted(drafted)


class ReadyCounts:
    """Counts, by number, the ranks that have finished a preparation requested of all of them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, int] = {}

    def is_last(self, number: int) -> bool:
        """Another rank is ready; whether it was the last one."""
        count = self._ready.pop(number, 0) + 1
        if count < self._ranks:
            self._ready[number] = count
        return count == self._ranks
