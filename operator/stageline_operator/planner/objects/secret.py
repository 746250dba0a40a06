"""The plan bus's shared token. Made once and then left alone: changing it would lock running stages out."""

from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.identity import bus_secret_name, object_metadata

TOKEN_KEY: Final = "token"


def build_bus_secret(model: PipelineModel, random_token: str) -> dict[str, Any]:
    """A Secret that holds `random_token`, which the caller draws."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(model, bus_secret_name(model), "bus"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: random_token},
    }
