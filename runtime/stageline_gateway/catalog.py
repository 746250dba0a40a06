"""What is served and whether it is ready: the bodies of `/v1/models` and `/readyz`. Pure.

A model that is known but not ready is listed, with the reason, so that a person sees why requests are turned away.
"""

from typing import Any

from stageline_gateway.discovery import EndpointsFile
from stageline_gateway.routing import why_not_ready


def describe_model(endpoints: EndpointsFile, model: str) -> dict[str, Any]:
    """OpenAI's model object and the state of its groups."""
    groups = endpoints.groups_of(model)
    ready = any(group.ready for group in groups)
    return {
        "id": model,
        "object": "model",
        "created": endpoints.first_seen[model],
        "owned_by": "stageline",
        "ready": ready,
        "message": "" if ready else why_not_ready(model, groups),
        "groups": [group.model_dump(include={"group", "incarnation", "ready", "message"}) for group in groups],
    }


def why_unready(endpoints: EndpointsFile) -> str:
    """Why no request at all could be served; empty when one could."""
    if any(group.ready for group in endpoints.current.groups):
        return ""
    if not endpoints.ever_read:
        return endpoints.problem or "The endpoints file has not been read yet."
    if not endpoints.current.groups:
        return "No model is served: the endpoints file lists no group."
    return " ".join(why_not_ready(model, endpoints.groups_of(model)) for model in endpoints.models())
