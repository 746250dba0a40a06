"""How many drafts a request's next verifying row carries, based on its recent acceptance. Pure.

This is an upper bound; the cost model chooses fewer where the acceptance estimated here makes fewer better. The length
doubles when all drafts of a row hold. From the second consecutive row without an accepted draft the length is halved.
It drops to 0 unless most earlier drafts held. One miss is weak evidence: at an acceptance of 0.7, three rows in ten
have no accepted draft. Lengths are one less than powers of two: with the newest token they fill the sizes that plans
are padded to, and cost no more than shorter lengths.

Rows without drafts count as evidence too: the draft that would have been made is compared with the token, which costs
no step. So where several requests step together and trials are too expensive, the estimate still improves. Drafting
that has stopped starts again as soon as several consecutive drafts would have held. If no draft was available for
`PROBE_TOKENS` output tokens, earlier evidence is dropped, and the next available draft may be tried.
"""

from dataclasses import dataclass
from math import sqrt

FIRST_LENGTH = 3
PROBE_LENGTH = 3
PROBE_TOKENS = 16
MISSES_TO_STOP = 2
HITS_TO_START = 3
"""Guesses in a row that would have held, after which drafts that had stopped are tried again."""
FIRST_ACCEPTANCE, FIRST_WEIGHT = 0.7, 3.0
"""What is thought of drafts that nothing is known of, and how many drafts' worth of evidence that is."""
LEAST_ACCEPTANCE = 0.15
"""Misses stop only drafts that seldom held lately: at 0.7 two misses in a row are common, and stopping would cost."""
FADING = 0.9
"""What a row's count is worth one row later."""
OTHERS_PER_ERROR = 6
"""Beside so many other requests a lucky streak is not believed until it is one standard error out of the question."""
MOST_WEIGHT = 16.0
"""Number of drafts kept as evidence: after a long copy, a dozen misses must suffice to show that it is over."""


@dataclass(slots=True)
class DraftLength:
    """Invariant: `length` is 0 or between 1 and `most`."""

    most: int
    length: int = -1
    probe_length: int = PROBE_LENGTH
    """How many drafts are tried where none were for long."""
    most_probe_tokens: int = PROBE_TOKENS
    """Each probe that fails doubles the tokens up to the next, up to so many: for drafts that cost time to make."""
    _probe_tokens: int = PROBE_TOKENS
    _held: float = FIRST_ACCEPTANCE * FIRST_WEIGHT
    _judged: float = FIRST_WEIGHT
    """Drafts of the last rows that held, and those that were put to the test: the ones after a miss were not."""
    _misses: int = 0
    _plain_tokens: int = 0
    """Since the last verifying row, or guess that was judged."""
    _would_hold: int = 0
    """Guesses in a row that would have held."""

    def __post_init__(self) -> None:
        assert self.most >= 1, self.most
        if self.length < 0:
            self.length = min(FIRST_LENGTH, self.most)

    @property
    def acceptance(self) -> float:
        """How likely a draft holds when those before it did, lately."""
        return self._held / self._judged

    def acceptance_beside(self, num_others: int) -> float:
        """`acceptance` minus a part of its standard error that grows with the number of requests that a mistake would
        delay."""
        error = sqrt(self.acceptance * (1.0 - self.acceptance) / self._judged)
        return self.acceptance - error * num_others / OTHERS_PER_ERROR

    def note_row(self, num_drafts: int, num_held: int) -> None:
        """A verifying row is back: of its drafts so many held."""
        self._judge(num_held, min(num_held + 1, num_drafts))
        self._misses = 0 if num_held else self._misses + 1
        self._probe_tokens = PROBE_TOKENS if num_held else min(self._probe_tokens * 2, self.most_probe_tokens)
        self._plain_tokens = self._would_hold = 0
        if num_held == num_drafts:
            self.length = min(max(self.length, num_drafts) * 2 + 1, self.most)
        elif self._misses >= MISSES_TO_STOP:
            self.length = 0 if self.acceptance < LEAST_ACCEPTANCE else max(1, self.length // 2)

    def note_plain_token(self) -> None:
        """A decode row without drafts has returned, and no draft would have been made for its token."""
        self._plain_tokens += 1
        if self._plain_tokens < self._probe_tokens:
            return
        self._plain_tokens = 0
        is_off = self.length == 0
        self._held = (LEAST_ACCEPTANCE if is_off else FIRST_ACCEPTANCE) * FIRST_WEIGHT
        self._judged = FIRST_WEIGHT
        if is_off:
            # One more miss stops it again.
            self.length, self._misses = min(self.probe_length, self.most), MISSES_TO_STOP - 1

    def note_guess(self, *, holds: bool) -> None:
        """A decode row without drafts is back; what would have been drafted for its token would have held, or not."""
        self._judge(int(holds), 1)
        self._plain_tokens = 0
        self._would_hold = self._would_hold + 1 if holds else 0
        longer = min(max(self.length * 2 + 1, HITS_TO_START), self.most)
        if self._would_hold >= longer > self.length:
            # A row of so many drafts would have held. One more miss stops what had stopped before.
            self._misses = 0 if self.length else MISSES_TO_STOP - 1
            self.length = longer

    def _judge(self, num_held: int, num_tested: int) -> None:
        self._held = self._held * FADING + num_held
        self._judged = self._judged * FADING + num_tested
        excess = max(1.0, self._judged / MOST_WEIGHT)
        self._held, self._judged = self._held / excess, self._judged / excess
