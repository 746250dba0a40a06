"""Whether a request may cause the groups that compute it to end, so that no further group is risked for it.

Groups also end for reasons of their own, so one loss is no evidence. Evidence is the same request at the same place: a
group that hung while it computed the request, twice, or consecutive groups that ended without another token of it. A
request that was only queued when its group ended doesn't count, nor does one that was moved on purpose. Losses of any
kind are bounded too, so that no request is retried forever.
"""

from dataclasses import dataclass
from typing import Final

from stageline_gateway.engine_client.run_events import EngineLostError, LossKind

MOST_HANGS: Final = 1
"""Groups that may hang on one request before it fails: an innocent request often meets one hang, never two."""
MOST_WITHOUT_A_TOKEN: Final = 2
"""Groups in a row that may end without another token of it. One more than hangs: a killed node takes requests along
that it only just began, and two nodes of an outage may take the same one along."""
BLAMELESS: Final = frozenset({LossKind.LEFT, LossKind.UNREACHABLE})
"""Losses that can't be the request's doing: it was moved on purpose, or nothing of it was ever sent."""


@dataclass(slots=True)
class Blame:
    """The losses of one choice of a request, over all groups that it was sent to."""

    losses: int = 0
    hangs: int = 0
    without_a_token: int = 0
    """Losses in a row, the last one among them, since which no token came."""
    _tokens: int = -1
    """How many there were at the last of them."""

    def lost(self, error: EngineLostError, tokens: int) -> None:
        """A group was lost when so many tokens of the choice had come."""
        if error.kind in BLAMELESS:
            return
        self.losses += 1
        self.hangs += error.kind is LossKind.HUNG
        if not error.had_no_part:
            self.without_a_token = self.without_a_token + 1 if tokens == self._tokens else 1
            self._tokens = tokens

    def reason(self, most_losses: int) -> str | None:
        """Why it is sent to no other group, as a sentence for the client; None while it may be."""
        if self.hangs > MOST_HANGS:
            return f"Groups hung {self.hangs} times while they computed this request, so it is sent to no other."
        if self.without_a_token > MOST_WITHOUT_A_TOKEN:
            lost = f"Engines were lost {self.without_a_token} times in a row without another token of this request"
            return f"{lost}, so it is sent to no other."
        if self.losses > most_losses:
            return f"Engines were lost {self.losses} times with this request, so it is sent to no other."
        return None
