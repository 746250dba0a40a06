"""How a scheduler's requests speculate, and where their drafts come from: the choice, made once for a group. Pure."""

from dataclasses import dataclass

from stageline_runtime.speculation.lookup_drafts import LookupDrafts
from stageline_runtime.speculation.model_drafts import ModelDrafts
from stageline_runtime.speculation.request_drafts import RequestDrafts
from stageline_runtime.speculation.settings import DraftSettings


@dataclass(slots=True)
class Speculation(DraftSettings):
    """As `DraftSettings`."""

    has_draft_model: bool = False
    """Whether drafts come from a model on the last stage; else from lookup."""

    @property
    def may_chain(self) -> bool:
        """Whether verifying rows may follow one another: a draft model goes on only from what is known."""
        return self.chains and not self.has_draft_model

    def of_request(self) -> RequestDrafts:
        return ModelDrafts(self) if self.has_draft_model else LookupDrafts(self)
