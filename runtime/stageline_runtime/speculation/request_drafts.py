"""One request's drafts: its lookup index, its adaptive lengths and what the cost model allows, as one question. Pure.

Drafts that follow a single token hold far less often than those that follow several. Each kind has a length and an
acceptance of its own, so that neither is judged by the other: a request alone tries both, many at once only the better.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stageline_runtime.speculation.draft_length import DraftLength
from stageline_runtime.speculation.lookup import TOKENS_PER_CALL, Lookup
from stageline_runtime.speculation.step_cost import StepCost

LEAST_CHANCE = 0.05
"""A broken chain costs stages that had nothing else to do their time, and little more."""
Tokens = Callable[[int, int], tuple[int, ...]]
"""The request's known tokens from one position up to another."""


@dataclass(slots=True)
class DraftCounts:
    """What became of all drafts of a scheduler, since the beginning."""

    drafted: int = 0
    held: int = 0
    rows: int = 0
    held_at: list[int] = field(default_factory=list)
    """By place in its row, from 0."""

    def note_row(self, num_drafts: int, num_held: int) -> None:
        self.drafted += num_drafts
        self.rows += 1
        self.held += num_held
        self.held_at += [0] * (num_held - len(self.held_at))
        for place in range(num_held):
            self.held_at[place] += 1


@dataclass(slots=True)
class Speculation:
    """How a scheduler's requests speculate."""

    tokens: int
    """Most drafts of a row."""
    min_match: int
    cost: StepCost
    counts: DraftCounts = field(default_factory=DraftCounts)
    chains: bool = True
    """Whether a verifying row may be sent before the one before it is back."""

    def of_request(self) -> "RequestDrafts":
        return RequestDrafts(self)


class RequestDrafts:
    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._lookup = Lookup(speculation.min_match)
        self._after_one, self._after_several = DraftLength(speculation.tokens), DraftLength(speculation.tokens)
        self._tried = self._after_several
        """Of the drafts proposed last, which are those in flight: none are proposed beside them."""

    def propose(self, known: int, tokens: Tokens, num_rows: int, depth: int = 1) -> tuple[int, ...]:
        """Drafts for what comes after `known` tokens, for one of `num_rows` rows of a plan; mostly none.

        `depth` is how many such rows may be in flight as a chain.
        """
        self._take(known, tokens)
        self._tried = tried = self._length_here()
        if not tried.length or len(self._lookup) < known:
            return ()
        depth = depth if self._speculation.chains else 1
        acceptance = tried.acceptance_beside(num_rows - 1)
        length = self._speculation.cost.best_length(num_rows, tried.length, acceptance, depth)
        return self.continuation(known, tokens, length)

    def continuation(self, known: int, tokens: Tokens, count: int) -> tuple[int, ...]:
        """As many as `count` tokens that may follow, whatever they cost."""
        self._take(known, tokens)
        return self._lookup.drafts(count) if count and len(self._lookup) == known else ()

    def _take(self, known: int, tokens: Tokens) -> None:
        """Index what is known; of a long prompt a part at each call."""
        start = len(self._lookup)
        self._lookup.extend(tokens(start, min(known, start + TOKENS_PER_CALL)))

    def _length_here(self) -> DraftLength:
        return self._after_one if self._lookup.matched == 1 else self._after_several

    def may_chain(self, num_tokens: int) -> bool:
        """Whether a row that is right only if the next `num_tokens` guesses are is likely enough to be.

        What follows a single token is not followed far: the next row may find a longer match.
        """
        is_likely = self._tried.acceptance**num_tokens >= LEAST_CHANCE
        return self._speculation.chains and self._tried is self._after_several and is_likely

    def note_row(self, num_drafts: int, num_held: int) -> None:
        """A verifying row is back."""
        self._tried.note_row(num_drafts, num_held)
        self._speculation.counts.note_row(num_drafts, num_held)

    def note_plain_token(self, known: int, tokens: Tokens) -> None:
        """A decode row without drafts is back: the newest of `known` tokens is its."""
        guess = self.continuation(known - 1, tokens, 1)
        if guess:
            self._length_here().note_guess(holds=guess == tokens(known - 1, known))
            return
        for length in (self._after_one, self._after_several):
            length.note_plain_token()
