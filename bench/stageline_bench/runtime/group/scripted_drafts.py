"""Drafts with a known acceptance rate: for paced stages, where every token is 0, and for drafts that are always wrong.

A draft is token 0 with the given probability and token 1 otherwise, depending only on its position. With real layers
and probability 0 every draft is wrong, because greedy decoding never generates token 1, a special token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stageline_runtime.speculation.lookup_drafts import LookupDrafts
from stageline_runtime.speculation.request_drafts import RequestDrafts, Tokens
from stageline_runtime.speculation.speculation import Speculation


class ScriptedDrafts(LookupDrafts):
    def __init__(self, speculation: "ScriptedSpeculation") -> None:
        super().__init__(speculation)
        self._acceptance = speculation.acceptance

    def continuation(self, known: int, tokens: Tokens, count: int) -> tuple[int, ...]:  # noqa: ARG002
        """Like the lookup's, but never empty."""
        return tuple(int(Random(known + place).random() >= self._acceptance) for place in range(count))


@dataclass(slots=True)
class ScriptedSpeculation(Speculation):
    acceptance: float = 0.0

    def of_request(self, prompt: Sequence[int] = (), cache_salt: str = "") -> RequestDrafts:  # noqa: ARG002
        return ScriptedDrafts(self)
