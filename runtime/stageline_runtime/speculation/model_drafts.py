"""One request's drafts by a draft model: what the last stage drafted after its newest token, and how much to ask for.

Each plan says how many tokens the last stage is to draft once the plan's own are sampled, so the question is asked one
plan ahead of the drafts' use. They are verified by the next row, as many as pay by then: computing them is done with.
What was drafted for tokens that came otherwise is worth nothing. Pure.
"""

from stageline_runtime.speculation.draft_length import DraftLength
from stageline_runtime.speculation.request_drafts import Tokens
from stageline_runtime.speculation.settings import DraftSettings

MOST_PROBE_TOKENS = 256
"""Interval between two trials of a draft model that doesn't help a request."""


class ModelDrafts:
    """Implements `RequestDrafts`."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._length = DraftLength(settings.tokens, probe_length=1, most_probe_tokens=MOST_PROBE_TOKENS)
        self._position = 0
        self._drafted: tuple[int, ...] = ()

    def steps_to_draft(self, known: int, num_rows: int, most: int, delayed_stages: int) -> int:
        """As `RequestDrafts`."""
        settings = self._settings
        most = min(most, self._length.length, settings.draft_context_tokens - known)
        if most < 1:
            return 0
        step_seconds = delayed_stages * settings.draft_step_seconds
        acceptance = self._length.acceptance_beside(num_rows - 1)
        return settings.cost.best_drafted_length(num_rows, most, acceptance, step_seconds)

    def take_drafted(self, position: int, token_ids: tuple[int, ...]) -> None:
        """As `RequestDrafts`."""
        self._position, self._drafted = position, token_ids

    def propose(self, known: int, tokens: Tokens, num_rows: int) -> tuple[int, ...]:
        """As `RequestDrafts`."""
        drafts = self.continuation(known, tokens, self._settings.tokens)
        acceptance = self._length.acceptance_beside(num_rows - 1)
        return drafts[: self._settings.cost.best_length(num_rows, len(drafts), acceptance)]

    def continuation(self, known: int, tokens: Tokens, count: int) -> tuple[int, ...]:
        """Up to `count` of the drafted tokens that may follow."""
        since = known - self._position
        if since < 0 or self._drafted[:since] != tokens(self._position, known):
            return ()
        return self._drafted[since : since + count]

    def note_row(self, num_drafts: int, num_held: int) -> None:
        """As `RequestDrafts`."""
        self._length.note_row(num_drafts, num_held)
        self._settings.counts.note_row(num_drafts, num_held)

    def note_plain_token(self, known: int, tokens: Tokens) -> None:
        """As `RequestDrafts`."""
        guess = self.continuation(known - 1, tokens, 1)
        if guess:
            self._length.note_guess(holds=guess == tokens(known - 1, known))
        else:
            self._length.note_plain_token()
