"""What is different about the pods of a model that vLLM runs: the stage container, and what it needs on a volume.

The `stage` container runs Stageline's supervisor of one vLLM node. Where `engine.image` or the operator names vLLM's
own image, nothing of Stageline is in it: an init container of Stageline's image copies what the supervisor and the
plugins need onto a volume, and the image's own Python runs them from there. Everything else of the pod is as for the
own runtime.
"""

from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.vllm_environment import PATH_VARIABLE
from stageline_operator.planner.types import VllmImages

FILES_CONTAINER: Final = "vllm-files"
FILES_VOLUME: Final = "stageline"
FILES_PATH: Final = "/opt/stageline-vllm"
SUPERVISOR_COMMAND: Final = ("stageline", "vllm-stage")
"""Where the stage's image has Stageline in it."""
CARRIED_SUPERVISOR_COMMAND: Final = ("python3", "-m", "stageline_vllm.supervisor")


def is_vllm(model: PipelineModel) -> bool:
    return model.spec.engine.name == "vllm"


def image_without_stageline(model: PipelineModel, images: VllmImages) -> str | None:
    """vLLM's own image, where Stageline has to come on a volume; None where the pod's image has it.

    The operator's image stands behind the template's: whoever names one there has put vLLM into it.
    """
    if not is_vllm(model):
        return None
    named = model.spec.engine.image
    return named if named is not None or model.spec.template.image is not None else images.stage or None


def vllm_container(container: dict[str, Any], bare_image: str | None) -> dict[str, Any]:
    """The own runtime's `stage` container, as one that supervises vLLM."""
    if bare_image is None:
        return container | {"command": list(SUPERVISOR_COMMAND)}
    return container | {
        "image": bare_image,
        "command": list(CARRIED_SUPERVISOR_COMMAND),
        "env": _with_files(container["env"]),
        "volumeMounts": [*container["volumeMounts"], _mount(read_only=True)],
    }


def _with_files(variables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The volume first on the path; what a person has put there stays behind it."""
    given = [each["value"] for each in variables if each["name"] == PATH_VARIABLE]
    others = [each for each in variables if each["name"] != PATH_VARIABLE]
    return [*others, {"name": PATH_VARIABLE, "value": ":".join([FILES_PATH, *given])}]


def files_container(container: dict[str, Any]) -> dict[str, Any]:
    """The init container that fills the volume, from one of Stageline's own image."""
    return container | {
        "command": ["stageline", FILES_CONTAINER, FILES_PATH],
        "volumeMounts": [*container["volumeMounts"], _mount(read_only=False)],
    }


def files_volume() -> dict[str, Any]:
    return {"name": FILES_VOLUME, "emptyDir": {}}


def _mount(*, read_only: bool) -> dict[str, Any]:
    return {"name": FILES_VOLUME, "mountPath": FILES_PATH, "readOnly": read_only}
