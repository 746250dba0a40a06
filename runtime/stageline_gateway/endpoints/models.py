"""`GET /v1/models`, and the two probes of the public port: what is served and whether it is ready.

A model that is known but not ready is listed, with the reason, so that a person sees why requests are turned away.
"""

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_api.version import stageline_version
from stageline_gateway.endpoints.json_answers import JsonAnswer
from stageline_gateway.endpoints.services import Services
from stageline_gateway.fleet import Fleets
from stageline_gateway.groups.backends import Backends
from stageline_gateway.groups.routing import why_not_ready
from stageline_gateway.served_models import ServedModel


def add_models(app: FastAPI, services: Services) -> None:
    fleets = services.fleets

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        caller = services.admission.caller_asking(request.headers)
        allowed = fleets.served.opened_to(caller, list(fleets.served.listed()))
        return JsonAnswer({"object": "list", "data": [describe_model(fleets, model) for model in allowed]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        caller = services.admission.caller_asking(request.headers)
        served = services.served.asked_by(caller, model, services.settings.retry_after_seconds)
        return JsonAnswer(describe_model(fleets, served))


def add_probes(app: FastAPI, services: Services) -> None:
    """As much as a load balancer needs; the same paths on the admin port say why."""

    @app.get("/healthz")
    async def healthz() -> Response:
        return JsonAnswer({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        """As vLLM has it: an empty 200 while a request could be served."""
        return Response(status_code=503 if _is_unready(services) else 200)

    @app.get("/version")
    async def told_version(request: Request) -> Response:
        services.admission.caller_asking(request.headers)
        return JsonAnswer({"version": stageline_version()})

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = not _is_unready(services)
        return JsonAnswer({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)


def _is_unready(services: Services) -> bool:
    return bool(services.admission.unwelcoming_because or why_unready(services.fleets))


def describe_model(fleets: Fleets, model: ServedModel) -> dict[str, Any]:
    """OpenAI's form of a model, with where it is and how its groups are."""
    backends = fleets.dispatcher_of(model).backends
    groups = backends.groups_of(model.name)
    ready = any(group.ready for group in groups)
    where = {"namespace": model.namespace, "full_name": model.full_name} if model.namespace else {}
    return {
        "id": fleets.served.id_of(model),
        "object": "model",
        "created": backends.discovered.first_seen[model.name],
        "owned_by": "stageline",
        **where,
        "ready": ready,
        "message": "" if ready else why_not_ready(model.name, groups),
        "groups": [
            group.model_dump(include={"group", "incarnation", "revision", "ready", "draining", "message"})
            for group in groups
        ],
    }


def why_unready(fleets: Fleets) -> str:
    """Why no request at all could be served; empty when one could."""
    reasons = [_why_unready(fleet.dispatcher.backends) for fleet in fleets.by_namespace.values()]
    return " ".join(reasons) if all(reasons) else ""


def _why_unready(backends: Backends) -> str:
    discovered = backends.discovered
    if any(group.ready for model in discovered.models() for group in backends.groups_of(model)):
        return ""
    if not discovered.ever_read:
        return discovered.why_unread
    if not discovered.models():
        return f"No model is served: the {discovered.source} lists no group."
    return " ".join(why_not_ready(model, backends.groups_of(model)) for model in discovered.models())
