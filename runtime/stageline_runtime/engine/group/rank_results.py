"""What the ranks of the last stage answer to one plan, put together. Pure.

Where requests belong to one rank each, every rank of the last stage samples its own rows, and a plan is done when all
of them have said so. Each rank answers plans in order, so plans are done in order too. What a rank has drafted after a
plan is kept until then: who hears of drafts knows the tokens that they follow, as with one rank.
"""

from dataclasses import dataclass, field

from stageline_runtime.plan_bus.messages import Drafted, StepDone


@dataclass(slots=True)
class _Answered:
    """A plan that some ranks have yet to answer."""

    done: list[StepDone] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)


class RankResults:
    """Answers by plan, of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[int, _Answered] = {}

    def take(self, answer: StepDone | Drafted) -> tuple[StepDone | Drafted, ...]:
        """One rank's answer; returns what can be told now, in this order: with the last rank's that of all of them."""
        if isinstance(answer, Drafted):
            return self._take_drafted(answer)
        if self._ranks == 1:
            return (answer,)
        waiting = self._waiting.setdefault(answer.seq, _Answered())
        waiting.done.append(answer)
        if len(waiting.done) < self._ranks:
            return ()
        del self._waiting[answer.seq]
        return (_of_all(waiting.done), *waiting.drafted)

    def _take_drafted(self, drafted: Drafted) -> tuple[Drafted, ...]:
        """A rank says what it has sampled before it says what it has drafted."""
        waiting = self._waiting.get(drafted.seq)
        if waiting is None:
            return (drafted,)
        waiting.drafted.append(drafted)
        return ()


def _of_all(answers: list[StepDone]) -> StepDone:
    rows = tuple(row for answer in answers for row in answer.rows)
    return StepDone(answers[0].seq, rows, tuple(report for answer in answers for report in answer.reports))


class ReadyCounts:
    """How many ranks have made ready what was asked of all of them, by number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[int, int] = {}

    def is_last(self, number: int) -> bool:
        """Another rank is ready; whether it was the last one."""
        count = self._ready.pop(number, 0) + 1
        if count < self._ranks:
            self._ready[number] = count
        return count == self._ranks
