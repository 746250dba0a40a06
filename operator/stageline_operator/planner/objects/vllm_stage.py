"""What differs in the pods of a model that vLLM runs: the stage container and its extra volume.

The `stage` container runs Stageline's supervisor of one vLLM node. vLLM's own image, named by `engine.image` or the
operator, does not contain Stageline. So an init container of Stageline's image copies the supervisor and the plugins to
a volume, and the Python of vLLM's image runs them from there. The rest of the pod is the same as for Stageline's
runtime.
"""

from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.vllm_environment import PATH_VARIABLE
from stageline_operator.planner.types import VllmImages

FILES_CONTAINER: Final = "vllm-files"
FILES_VOLUME: Final = "stageline"
FILES_PATH: Final = "/opt/stageline-vllm"
SUPERVISOR_COMMAND: Final = ("stageline", "vllm-stage")
"""For a stage image that contains Stageline."""
CARRIED_SUPERVISOR_COMMAND: Final = ("python3", "-m", "stageline_vllm.supervisor")


def is_vllm(model: PipelineModel) -> bool:
    return model.spec.engine.name == "vllm"


def image_without_stageline(model: PipelineModel, images: VllmImages) -> str | None:
    """vLLM's own image, if Stageline must come from a volume; None if the pod's image contains Stageline.

    The template's image takes precedence over the operator's: an image named there contains vLLM.
    """
    if not is_vllm(model):
        return None
    named = model.spec.engine.image
    return named if named is not None or model.spec.template.image is not None else images.stage or None


def vllm_container(container: dict[str, Any], bare_image: str | None) -> dict[str, Any]:
    """The runtime's `stage` container, changed to supervise vLLM."""
    if bare_image is None:
        return container | {"command": list(SUPERVISOR_COMMAND)}
    return container | {
        "image": bare_image,
        "command": list(CARRIED_SUPERVISOR_COMMAND),
        "env": _with_files(container["env"]),
        "volumeMounts": [*container["volumeMounts"], _mount(read_only=True)],
    }


def _with_files(variables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the volume first on the path; keep the user's entries after it."""
    given = [each["value"] for each in variables if each["name"] == PATH_VARIABLE]
    others = [each for each in variables if each["name"] != PATH_VARIABLE]
    return [*others, {"name": PATH_VARIABLE, "value": ":".join([FILES_PATH, *given])}]


def files_container(container: dict[str, Any]) -> dict[str, Any]:
    """The init container that fills the volume, derived from one of Stageline's image."""
    return container | {
        "command": ["stageline", FILES_CONTAINER, FILES_PATH],
        "volumeMounts": [*container["volumeMounts"], _mount(read_only=False)],
    }


def files_volume() -> dict[str, Any]:
    return {"name": FILES_VOLUME, "emptyDir": {}}


def _mount(*, read_only: bool) -> dict[str, Any]:
    return {"name": FILES_VOLUME, "mountPath": FILES_PATH, "readOnly": read_only}
