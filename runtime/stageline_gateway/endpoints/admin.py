"""What operators ask and clients must not: metrics and state in detail. An application of its own, for a port of its
own. It asks for no key, so it is for the cluster's inside, and nothing here changes anything: a gateway is drained by a
signal (`settings.DRAIN_SIGNAL`), which takes the right to run a command in its pod or as its user.
"""

import asyncio

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_api.engine_access import why_unwelcome
from stageline_gateway.endpoints.json_answers import JsonAnswer, add_error_forms
from stageline_gateway.endpoints.models import describe_model, why_unready
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError
from stageline_gateway.fleet import Fleets
from stageline_gateway.served_models import ServedModel


def build_admin(services: Services) -> FastAPI:
    app = FastAPI(title="Stageline gateway, admin", openapi_url=None, dependencies=[Depends(_check_caller)])
    fleets = services.fleets

    @app.get("/healthz")
    async def healthz() -> Response:
        return JsonAnswer({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = services.admission.unwelcoming_because or why_unready(fleets)
        body = {"status": "not ready", "message": reason} if reason else {"status": "ready"}
        return JsonAnswer(body, status_code=503 if reason else 200)

    @app.get("/accepting")
    async def accepting() -> Response:
        """Whether clients belong here, for a cluster's probes: what is served was read once, and nothing drains.

        Of several namespaces one that can't be read keeps no client from the others. Says nothing about models: while
        none is ready, requests wait here or get the reason, so they must get in.
        """
        unread = fleets.why_unread
        reason = services.admission.unwelcoming_because or unread
        return JsonAnswer({"accepting": not reason, "message": reason}, status_code=503 if reason else 200)

    @app.get("/status")
    async def status() -> Response:
        return JsonAnswer(_state(services))

    @app.get("/metrics")
    async def metrics_page(request: Request) -> Response:
        body, content_type = services.metrics.registry.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    add_error_forms(app)
    return app


async def _check_caller(request: Request) -> None:
    """Raise ApiError 403 for what a web page asks. In a cluster this port is asked by a service's name too."""
    reason = why_unwelcome(request.headers, any_name=True)
    if reason is not None:
        raise ApiError(403, reason, "permission_error", code="web_page")


def _state(services: Services) -> dict[str, object]:
    admission, fleets = services.admission, services.fleets
    bodies, discovered = admission.bodies, [fleet.discovered for fleet in fleets.by_namespace.values()]
    served, listed = fleets.served, list(fleets.served.listed())
    problems = [*(one.problem for one in discovered), admission.keys.problem if admission.keys else ""]
    return {
        "draining": bool(admission.unwelcoming_because),
        "open_requests": admission.open,
        "tasks": len(asyncio.all_tasks()),
        "bodies": {
            "bytes": bodies.held_bytes,
            "most_bytes": bodies.most_held_bytes,
            "being_read": bodies.num_reading,
        },
        "queued_requests": {served.id_of(model): count for model, count in admission.waiting.items() if count},
        "keys": None if admission.keys is None else len(admission.keys.ring.callers),
        "problems": [one for one in problems if one],
        "resume_window_seconds": {served.id_of(model): _resume_window(fleets, model) for model in listed},
        "models": [describe_model(fleets, model) for model in listed],
    }


def _resume_window(fleets: Fleets, model: ServedModel) -> float:
    return fleets.by_namespace[model.namespace].discovered.resume_window_seconds(model.name)
