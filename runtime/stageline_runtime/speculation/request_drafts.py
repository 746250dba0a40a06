"""What the scheduler asks of one request's drafts, wherever they come from. Pure."""

from collections.abc import Callable
from typing import Protocol

Tokens = Callable[[int, int], tuple[int, ...]]
"""The request's known tokens from one position up to another."""


class RequestDrafts(Protocol):
    def propose(self, known: int, tokens: Tokens, num_rows: int) -> tuple[int, ...]:
        """Drafts for the positions after `known` tokens, for one of `num_rows` rows of a plan; mostly none."""

    def note_row(self, num_drafts: int, num_held: int) -> None:
        """A verifying row is back."""

    def note_plain_token(self, known: int, tokens: Tokens) -> None:
        """A decode row without drafts is back: the newest of `known` tokens is its."""

    def steps_to_draft(self, known: int, num_rows: int, most: int, delayed_stages: int) -> int:
        """How many tokens the last stage drafts after one of `num_rows` rows that is planned now, at most `most`.

        `known` is how many tokens will be known then, `delayed_stages` how many stages are idle during drafting.
        """

    def take_drafted(self, position: int, token_ids: tuple[int, ...]) -> None:
        """The last stage has drafted `token_ids` from `position` on, right after what it had sampled."""
