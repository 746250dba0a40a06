"""The images of a group's pods where the model names none: the operator's, as they were when the incarnation began.

They are on record with the incarnation, so that an operator with other ones, which takes over in the middle, gives all
pods of a group the same. Of an incarnation that has nothing on record (a lost status) they are today's. One that has an
image on record and none of vLLM's was begun by an operator that knew none: its pods have that one image.
"""

from typing import Any

from stageline_api.resource.life.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.objects.vllm_stage import is_vllm
from stageline_operator.planner.types import VllmImages


def images_to_record(context: Context, revision: str) -> dict[str, Any]:
    """What the status of a group keeps for an incarnation that begins; of vLLM's only where it runs the stages."""
    setting, model = context.setting, context.model_at(revision)
    runs_vllm = model is not None and is_vllm(model)
    return {
        "image": setting.default_image,
        "vllm_image": setting.vllm_images.stage if runs_vllm else None,
        "vllm_files_image": setting.vllm_images.files if runs_vllm else None,
    }


def default_image_of(context: Context, status: GroupStatus) -> str:
    return status.image or context.setting.default_image


def vllm_images_of(context: Context, status: GroupStatus) -> VllmImages:
    if not status.image:
        return context.setting.vllm_images
    return VllmImages(stage=status.vllm_image or "", files=status.vllm_files_image or "")
