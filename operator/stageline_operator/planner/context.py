"""The inputs of one pass, shared by the parts of the planner, and values derived from them for any revision."""

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
        """Whether an annotation asks to retry failed groups now. Each request is obeyed once."""
        return self.restart_request not in ("", self.observed.status.restart_request)

    @property
    def restart_request(self) -> str:
        return self.model.metadata.annotations.get(labels.RESTART, "")

    def model_at(self, revision: str) -> PipelineModel | None:
        """The model at a revision, with the current policies; None if the revision is unknown."""
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
            return None  # another version of the operator wrote it and accepted a spec that this one refuses

    def stage_count(self, group: GroupStatus) -> int:
        """Number of stages of a group at its own revision; if that is unknown, the number of rows in its status."""
        model = self.model_at(group.revision)
        return len(group.stages) if model is None else model.spec.parallelism.pipeline

    def jitter(self, group: GroupStatus) -> float:
        """A number in [0, 1) that differs between groups and incarnations and is the same in every pass."""
        who = f"{self.model.namespace}/{self.model.name}/{self.model.metadata.uid}/{group.index}/{group.incarnation}"
        return int.from_bytes(hashlib.sha256(who.encode()).digest()[:4]) / 2**32


def images_to_record(context: Context, revision: str) -> dict[str, Any]:
    """The images that a group's status records for a new incarnation; vLLM's only if vLLM runs the stages.

    An operator with other images that takes over midway then gives all pods of the group the same images.
    """
    setting, model = context.setting, context.model_at(revision)
    runs_vllm = model is not None and is_vllm(model)
    return {
        "image": setting.default_image,
        "vllm_image": setting.vllm_images.stage if runs_vllm else None,
        "vllm_files_image": setting.vllm_images.files if runs_vllm else None,
    }


def default_image_of(context: Context, status: GroupStatus) -> str:
    """The recorded image; the current default if none is recorded, as after a lost status."""
    return status.image or context.setting.default_image


def vllm_images_of(context: Context, status: GroupStatus) -> VllmImages:
    """The recorded vLLM images; none if an operator without a vLLM image began the incarnation."""
    if not status.image:
        return context.setting.vllm_images
    return VllmImages(stage=status.vllm_image or "", files=status.vllm_files_image or "")
