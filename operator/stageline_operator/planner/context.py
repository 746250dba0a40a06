"""The inputs of one pass as the parts of the planner share them, and what follows from them for any revision."""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from stageline_api import labels
from stageline_api.resource.life.status import GroupStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import SHAPELESS_FIELDS, revision_of
from stageline_operator.planner.types import Observed, Setting


@dataclass(frozen=True)
class Context:
    """One pass over one model."""

    model: PipelineModel
    setting: Setting
    observed: Observed
    now: datetime
    revision: str

    @classmethod
    def of(cls, model: PipelineModel, observed: Observed, now: datetime, setting: Setting) -> "Context":
        return cls(model, setting, observed, now, revision_of(model))

    @property
    def restart_requested(self) -> bool:
        """Whether a person asks, by annotation, to try failed groups again at once; a request is obeyed once."""
        return self.restart_request not in ("", self.observed.status.restart_request)

    @property
    def restart_request(self) -> str:
        return self.model.metadata.annotations.get(labels.RESTART, "")

    def model_at(self, revision: str) -> PipelineModel | None:
        """The model as it was at a revision, with today's policies; None when that isn't known any more."""
        if revision == self.revision:
            return self.model
        spec = self.observed.revision_specs.get(revision)
        if spec is None:
            return None
        manifest = self.model.to_manifest()
        policies = {name: value for name, value in manifest["spec"].items() if name in SHAPELESS_FIELDS}
        try:
            return PipelineModel.model_validate(manifest | {"spec": {**spec, **policies}})
        except ValidationError:
            return None  # written by another version of the operator, which allowed what this one refuses

    def stage_count(self, group: GroupStatus) -> int:
        """Stages of a group at its own revision; where that isn't known, as many as its status has rows."""
        model = self.model_at(group.revision)
        return len(group.stages) if model is None else model.spec.parallelism.pipeline

    def jitter(self, group: GroupStatus) -> float:
        """A number in [0, 1) that differs between groups and incarnations, and is the same in every pass."""
        who = f"{self.model.namespace}/{self.model.name}/{self.model.metadata.uid}/{group.index}/{group.incarnation}"
        return int.from_bytes(hashlib.sha256(who.encode()).digest()[:4]) / 2**32
