"""What one request's drafts can win at most, whatever lengths of rows anybody chooses: exact, by search.

A pipeline of stages that take `step + token * padded tokens` for a row, each row in turn; a draft holds with a known
probability given those before. Results reach the first stage at once, plans of no use vanish at once: a real engine
only loses by comparison. From one wrong guess to the next come `1 / (1 - acceptance)` tokens on the average. Nothing is
known of the next wrong guess before it is found, so a policy is a sequence of row lengths, and a row's end that of the
flow shop of the rows since the last wrong guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline_runtime.plan_bus.step_plan import padded_size

LONGEST_ROW = 16
LEAST_CHANCE = 1e-3
"""Of rows that are still looked at; those after them count as if no stage but the last one took time."""


@dataclass(frozen=True, slots=True)
class TimedStages:
    num_stages: int
    step_seconds: float
    token_seconds: float
    pads: bool = True
    """False: as if a row of any length took only its own tokens' time."""

    def seconds(self, num_tokens: int) -> float:
        """What a row takes in one stage."""
        return self.step_seconds + self.token_seconds * (padded_size(num_tokens) if self.pads else num_tokens)

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of a row that may be best: all, or the longest of each padded size."""
        return (1, 2, 4, 8, 16) if self.pads else range(1, LONGEST_ROW + 1)

    def plain_rate(self) -> float:
        """Tokens per second without drafts."""
        return 1.0 / (self.num_stages * self.seconds(1))

    def best_rate_of_single_rows(self, acceptance: float) -> float:
        """At most one row in flight."""
        return max(
            sum(acceptance**place for place in range(size)) / (self.num_stages * self.seconds(size))
            for size in self.sizes
        )

    def best_rate_of_chains(self, acceptance: float) -> float:
        """Any number of rows in flight."""
        return 1.0 / (1.0 - acceptance) / self._least_seconds(acceptance)

    def _least_seconds(self, acceptance: float) -> float:
        """From one wrong guess to the next, on the average, with the best of all sequences of row lengths."""
        least = float("inf")
        # What rows take in the last stage alone, up to the one with a wrong guess: as if it never waited for one.
        unhindered = min(self.seconds(size) / (1.0 - acceptance**size) for size in self.sizes)

        def follow(ends: Sequence[float], chance: float, seconds: float) -> None:
            """Rows so far end at the stages at `ends` and all hold with `chance`."""
            nonlocal least
            at_least = seconds + chance * (ends[-1] + unhindered)
            if at_least >= least:
                return
            if chance < LEAST_CHANCE:
                least = at_least
                return
            for size in self.sizes:
                after, end = list[float](), 0.0
                for before in ends:
                    end = max(before, end) + self.seconds(size)
                    after.append(end)
                held = chance * acceptance**size
                follow(after, held, seconds + (chance - held) * end)

        # A chain of equal rows is a first bound, and near the best.
        for size in self.sizes:
            held = acceptance**size
            rows = self.num_stages + held / (1.0 - held)
            least = min(least, rows * self.seconds(size))
        follow([0.0] * self.num_stages, 1.0, 0.0)
        return least
