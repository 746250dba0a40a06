"""What is served and whether it is ready: the bodies of `/v1/models` and `/readyz`. Pure.

A model that is known but not ready is listed, with the reason, so that a person sees why requests are turned away.
"""

from typing import Any

from stageline_gateway.groups.backends import Backends
from stageline_gateway.groups.routing import why_not_ready


def describe_model(backends: Backends, model: str) -> dict[str, Any]:
    """OpenAI's model object and the state of its groups."""
    groups = backends.groups_of(model)
    ready = any(group.ready for group in groups)
    return {
        "id": model,
        "object": "model",
        "created": backends.served.first_seen[model],
        "owned_by": "stageline",
        "ready": ready,
        "message": "" if ready else why_not_ready(model, groups),
        "groups": [
            group.model_dump(include={"group", "incarnation", "revision", "ready", "draining", "message"})
            for group in groups
        ],
    }


def why_unready(backends: Backends) -> str:
    """Why no request at all could be served; empty when one could."""
    served = backends.served
    if any(group.ready for model in served.models() for group in backends.groups_of(model)):
        return ""
    if not served.ever_read:
        return served.problem or f"The {served.source} has not been read yet."
    if not served.models():
        return f"No model is served: the {served.source} lists no group."
    return " ".join(why_not_ready(model, backends.groups_of(model)) for model in served.models())
