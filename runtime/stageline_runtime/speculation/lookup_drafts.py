"""One request's drafts: its lookup index, its adaptive lengths and what the cost model allows, as one question. Pure.

Where recent answers are kept, one that knows more of the last tokens than the request's own index is copied instead.

Drafts that follow a single token hold far less often than those that follow several. Each kind has a length and an
acceptance of its own, so that neither is judged by the other: a request alone tries both, many at once only the better.
"""

from stageline_runtime.plan_bus.step_plan import BusProtocolError
from stageline_runtime.speculation.draft_length import DraftLength
from stageline_runtime.speculation.lookup import TOKENS_PER_CALL, Lookup
from stageline_runtime.speculation.recent_answers import Key, Match, RecentAnswers
from stageline_runtime.speculation.request_drafts import Tokens
from stageline_runtime.speculation.settings import DraftSettings


class LookupDrafts:
    """Implements `RequestDrafts`."""

    def __init__(self, settings: DraftSettings, recent: tuple[RecentAnswers, Key] | None = None) -> None:
        """`recent`: answers that ended lately, and which of them this request may draft from."""
        self._settings = settings
        self._recent = recent
        self._lookup = Lookup(settings.min_match)
        self._after_one, self._after_several = DraftLength(settings.tokens), DraftLength(settings.tokens)
        self._tried = self._after_several
        """Of the drafts proposed last, which are those in flight: none are proposed beside them."""
        self._found: tuple[int, Match | None] = 0, None
        """What recent answers know of the end of so many known tokens: looked for once, asked for several times."""

    def propose(self, known: int, tokens: Tokens, num_rows: int) -> tuple[int, ...]:
        """As `RequestDrafts`."""
        self._take(known, tokens)
        self._tried = tried = self._length_here(known, tokens)
        if not tried.length or len(self._lookup) < known:
            return ()
        acceptance = tried.acceptance_beside(num_rows - 1)
        length = self._settings.cost.best_length(num_rows, tried.length, acceptance)
        return self.continuation(known, tokens, length)

    def continuation(self, known: int, tokens: Tokens, count: int) -> tuple[int, ...]:
        """As many as `count` tokens that may follow, whatever they cost."""
        self._take(known, tokens)
        if not count or len(self._lookup) != known:
            return ()
        found = self._recently(known, tokens)
        return self._lookup.drafts(count) if found is None else found.following(count)

    def _recently(self, known: int, tokens: Tokens) -> Match | None:
        """The match in a recent answer, if it is longer than the match in the request itself."""
        if self._recent is None or len(self._lookup) != known:
            return None
        if self._found[0] != known:
            answers, key = self._recent
            end = tokens(max(0, known - answers.longest), known)
            self._found = known, answers.match(key, end, longer_than=self._lookup.matched)
        return self._found[1]

    def _take(self, known: int, tokens: Tokens) -> None:
        """Index the known tokens; a long prompt is indexed in parts, one per call."""
        start = len(self._lookup)
        self._lookup.extend(tokens(start, min(known, start + TOKENS_PER_CALL)))

    def _length_here(self, known: int, tokens: Tokens) -> DraftLength:
        found = self._recently(known, tokens)
        matched = self._lookup.matched if found is None else found.size
        return self._after_one if matched == 1 else self._after_several

    def note_row(self, num_drafts: int, num_held: int) -> None:
        """As `RequestDrafts`."""
        self._tried.note_row(num_drafts, num_held)
        self._settings.counts.note_row(num_drafts, num_held)

    def note_plain_token(self, known: int, tokens: Tokens) -> None:
        """As `RequestDrafts`."""
        guess = self.continuation(known - 1, tokens, 1)
        if guess:
            self._length_here(known - 1, tokens).note_guess(holds=guess == tokens(known - 1, known))
            return
        for length in (self._after_one, self._after_several):
            length.note_plain_token()

    def steps_to_draft(self, known: int, num_rows: int, most: int, delayed_stages: int) -> int:  # noqa: ARG002
        """None: what follows is looked up here."""
        return 0

    def take_drafted(self, position: int, token_ids: tuple[int, ...]) -> None:
        """None was asked for."""
        raise BusProtocolError(f"DraftedRow.token_ids {token_ids} at {position}, but no plan asks for drafts")
