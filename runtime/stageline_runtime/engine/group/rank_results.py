"""What the ranks of the last stage answer to one plan, put together. Pure.

Where requests belong to one rank each, every rank of the last stage samples its own rows, and a plan is done when all
of them have said so. Each rank answers plans in order, so plans are done in order too.
"""

from stageline_runtime.plan_bus.messages import StepDone


class RankResults:
    """Answers by plan, of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._answers: dict[int, list[StepDone]] = {}

    def take(self, done: StepDone) -> StepDone | None:
        """One rank's answer; returns that of all of them with the last one."""
        if self._ranks == 1:
            return done
        answers = self._answers.setdefault(done.seq, [])
        answers.append(done)
        if len(answers) < self._ranks:
            return None
        del self._answers[done.seq]
        rows = tuple(row for answer in answers for row in answer.rows)
        return StepDone(done.seq, rows, tuple(report for answer in answers for report in answer.reports))


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
