"""The inputs of one pass as the parts of the planner share them, and what follows from them for any revision."""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from stageline_api import labels
from stageline_api.resource.life.status import GroupStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import SHAPELESS_FIELDS, revision_of
from stageline_operator.planner.objects.vllm_stage import is_vllm
from stageline_operator.planner.types import Observed, Setting, VllmImages


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
            return PipelineModel.read_accepted(manifest | {"spec": {**spec, **policies}})
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


def images_to_record(context: Context, revision: str) -> dict[str, Any]:
    """What the status of a group keeps for an incarnation that begins; of vLLM's only where it runs the stages.

    An operator with other images, which takes over in the middle, so gives all pods of a group the same.
    """
    setting, model = context.setting, context.model_at(revision)
    runs_vllm = model is not None and is_vllm(model)
    return {
        "image": setting.default_image,
        "vllm_image": setting.vllm_images.stage if runs_vllm else None,
        "vllm_files_image": setting.vllm_images.files if runs_vllm else None,
    }


def default_image_of(context: Context, status: GroupStatus) -> str:
    """Today's where nothing is on record, as after a lost status."""
    return status.image or context.setting.default_image


def vllm_images_of(context: Context, status: GroupStatus) -> VllmImages:
    """None where an image is on record alone: the incarnation was begun by an operator that knew no other."""
    if not status.image:
        return context.setting.vllm_images
    return VllmImages(stage=status.vllm_image or "", files=status.vllm_files_image or "")
