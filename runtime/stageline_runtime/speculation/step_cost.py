"""Whether drafts pay: what a step costs by its tokens, measured at warm-up, against what the drafts may win. Pure.

A round of one plan over all stages takes `fixed + token * padded tokens`. A row of `n` drafts of which each holds with
probability `a` given the ones before is worth `a + a^2 + … + a^n` tokens more than a decode row. They pay when tokens
per second of the whole cohort rise: with `r` rows, `(r + gain) / t(r + n) > r / t(r)`; the best `n` counts. Beside
others a verifying row also costs the step that it stands out of, because it is planned only once its newest token is
known; alone there is nothing to stand out of.
"""

from dataclasses import dataclass

from stageline_runtime.plan_bus.step_plan import padded_size

WORTH_DRAFTING = 1.05
"""What drafts that have yet to be made must promise: their request waits for them, which costs more than their time."""


@dataclass(frozen=True, slots=True)
class StepCost:
    fixed_seconds: float
    token_seconds: float

    @classmethod
    def of_two(cls, small: tuple[int, float], large: tuple[int, float], head_share: float) -> "StepCost":
        """From two measured plans (tokens, seconds) that computed no logits, a share `head_share` of a step's work."""
        slope = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(0.0, small[1] - slope * small[0]), slope / (1.0 - head_share))

    def seconds(self, num_tokens: int) -> float:
        return self.fixed_seconds + self.token_seconds * padded_size(num_tokens)

    def rate(self, num_rows: int, num_drafts: int, acceptance: float) -> float:
        """Tokens per second of plans with `num_rows` rows, one of which carries `num_drafts` drafts."""
        missed = 1.0 if num_drafts and num_rows > 1 else 0.0
        gain = expected_tokens(num_drafts, acceptance) - missed
        return (num_rows + gain) / self.seconds(num_rows + num_drafts)

    def best_length(self, num_rows: int, most: int, acceptance: float) -> int:
        """Of `most`, its halves and 0, what gives the highest rate; among equals the smallest."""
        best, highest, length = 0, self.rate(num_rows, 0, acceptance), most
        lengths = []
        while length:
            lengths.append(length)
            length //= 2
        for length in reversed(lengths):
            if (rate := self.rate(num_rows, length, acceptance)) > highest:
                best, highest = length, rate
        return best

    def best_drafted_length(self, num_rows: int, most: int, acceptance: float, draft_seconds: float) -> int:
        """As `best_length`, where the drafts have yet to be made, for all rows of the plan at once.

        Each of them takes a step of the draft model, which delays the round by `draft_seconds`: with `r` rows,
        `r * (1 + gain) / (t(r * (1 + n)) + n * draft_seconds)`.
        """
        best, highest, length = 0, WORTH_DRAFTING * self.rate(num_rows, 0, acceptance), most
        lengths = []
        while length:
            lengths.append(length)
            length //= 2
        for length in reversed(lengths):
            seconds = self.seconds(num_rows * (1 + length)) + length * draft_seconds
            if (rate := num_rows * (1.0 + expected_tokens(length, acceptance)) / seconds) > highest:
                best, highest = length, rate
        return best


FREE = StepCost(1.0, 0.0)
"""Of steps that take the same time whatever is in them: drafts always pay."""


def expected_tokens(num_drafts: int, acceptance: float) -> float:
    """How many of `num_drafts` drafts hold on the average."""
    expected, held = 0.0, 1.0
    for _ in range(num_drafts):
        held *= acceptance
        expected += held
    return expected
