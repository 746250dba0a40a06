"""How a scheduler's requests speculate, and where their drafts come from: the choice, made once for a group. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stageline_runtime.speculation.lookup_drafts import LookupDrafts
from stageline_runtime.speculation.model_drafts import ModelDrafts
from stageline_runtime.speculation.recent_answers import RecentAnswers, key_of
from stageline_runtime.speculation.request_drafts import RequestDrafts
from stageline_runtime.speculation.settings import DraftSettings


@dataclass(slots=True)
class Speculation(DraftSettings):
    """As `DraftSettings`."""

    has_draft_model: bool = False
    """Whether drafts come from a model on the last stage; else from lookup."""
    num_recent_answers: int = 0
    """How many answers that have ended lookup may copy from, besides the request itself."""
    _answers: RecentAnswers = field(init=False)

    def __post_init__(self) -> None:
        self._answers = RecentAnswers(0 if self.has_draft_model else self.num_recent_answers, self.min_match)

    def of_request(self, prompt: Sequence[int] = (), cache_salt: str = "") -> RequestDrafts:
        """For a request of this prompt, which shares the cache with those of its salt."""
        if self.has_draft_model:
            return ModelDrafts(self)
        return LookupDrafts(self, (self._answers, key_of(prompt, cache_salt)) if self.num_recent_answers else None)

    def note_answer(self, prompt: Sequence[int], cache_salt: str, output: Sequence[int]) -> None:
        """Records the output of a request that has ended or was aborted: later answers may repeat it."""
        self._answers.note_answer(prompt, cache_salt, output)
