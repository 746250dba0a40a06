"""Drafts whose truth is known beforehand, in place of a request's own: right, wrong, or now this and now that."""

from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import assert_never

from stageline_runtime.speculation.lookup_drafts import LookupDrafts
from stageline_runtime.speculation.model_drafts import ModelDrafts
from stageline_runtime.speculation.request_drafts import Tokens
from stageline_runtime.speculation.settings import DraftSettings
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE

MOST = 7


class Drafting(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    RANDOM = "random"
    LOOKUP = "lookup"
    MODEL = "model"
    """A draft model on the last stage, which knows what will be said unless penalties change it."""
    STRANGE_MODEL = "strange model"
    """One that knows nothing."""


MODELS = (Drafting.MODEL, Drafting.STRANGE_MODEL)
UNSCRIPTED = (Drafting.LOOKUP, *MODELS)


def speculation(min_match: int = 1, *, draft_context_tokens: int = 0) -> Speculation:
    """Of a scheduler whose requests may always draft: by a model, where that has a context."""
    return Speculation(
        MOST,
        min_match,
        FREE,
        draft_context_tokens=draft_context_tokens,
        has_draft_model=draft_context_tokens > 0,
    )


class MoodyModelDrafts(ModelDrafts):
    """Asks for any number of drafts, now and then for none, and verifies as many of them as it likes."""

    def __init__(self, settings: DraftSettings, seed: int) -> None:
        super().__init__(settings)
        self._settings = settings
        self._random = Random(seed)

    def steps_to_draft(self, known: int, num_rows: int, most: int, delayed_stages: int) -> int:  # noqa: ARG002
        """Whatever it costs."""
        most = min(most, MOST, self._settings.draft_context_tokens - known)
        return self._random.choice((0, 1, self._random.randint(0, MOST))) if most >= MOST else max(0, most)

    def propose(self, known: int, tokens: Tokens, num_rows: int) -> tuple[int, ...]:  # noqa: ARG002
        """Of what was drafted, some."""
        return self.continuation(known, tokens, self._random.randint(0, MOST))


class ScriptedDrafts(LookupDrafts):
    def __init__(self, kind: Drafting, whole: Callable[[], tuple[int, ...]], seed: int, vocab_size: int) -> None:
        """`whole` is prompt and output as they will be."""
        super().__init__(speculation())
        self._kind = kind
        self._whole = whole
        self._random = Random(seed)
        self._seed = seed
        self._vocab_size = vocab_size

    def propose(self, known: int, tokens: Tokens, num_rows: int) -> tuple[int, ...]:  # noqa: ARG002
        """Of any length; those past the end of the request say anything."""
        return self.continuation(known, tokens, self._random.randint(0, MOST))

    def continuation(self, known: int, tokens: Tokens, count: int) -> tuple[int, ...]:
        """As `propose`, of this length; what it says of a place is always the same."""
        whole = self._whole()
        assert tokens(0, known) == whole[:known], f"{tokens(0, known)} is not the beginning of {whole}"
        right = [*whole[known : known + count]]
        chances = [Random(self._seed * 1_000 + known + place).random() for place in range(count)]
        right += [int(chance * self._vocab_size) for chance in chances[len(right) :]]
        match self._kind:
            case Drafting.RIGHT:
                return tuple(right)
            case Drafting.WRONG:
                return tuple((token + 1) % self._vocab_size for token in right)
            case Drafting.RANDOM:
                return tuple(
                    (token + 1) % self._vocab_size if chance < 0.15 else token
                    for token, chance in zip(right, chances, strict=True)
                )
            case Drafting.LOOKUP | Drafting.MODEL | Drafting.STRANGE_MODEL:
                raise AssertionError(f"{self._kind} is no script")
            case _:
                assert_never(self._kind)
