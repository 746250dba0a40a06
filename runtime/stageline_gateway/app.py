"""The gateway as an ASGI application: routes, error forms, and what lives as long as the application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.admission.admission import Admission
from stageline_gateway.admission.body_memory import Intake
from stageline_gateway.admission.keys_file import KeysFile
from stageline_gateway.endpoints.admin import build_admin
from stageline_gateway.endpoints.completions import Door, complete, prepare_chat, prepare_completion
from stageline_gateway.endpoints.openapi import document
from stageline_gateway.endpoints.page import add_page
from stageline_gateway.endpoints.pipeline_watch import PipelineWatch
from stageline_gateway.endpoints.tokenize_routes import add_tokenize_routes
from stageline_gateway.engine_client.engine_calls import EngineCalls
from stageline_gateway.errors import model_not_found, not_supported
from stageline_gateway.fleet import build_fleet
from stageline_gateway.groups.catalog import describe_model, why_unready
from stageline_gateway.groups.watching import kept_going
from stageline_gateway.server.responses import JsonAnswer, add_error_forms
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.tracing import open_tracing


def build_app(settings: GatewaySettings) -> FastAPI:
    """A gateway: the application for clients.

    `app.state.admin` is the application for the admin port, `app.state.leave` says why clients should go elsewhere,
    `app.state.cut` is an event that ends open answers with an error when it is set, and `app.state.gauges` shows what
    the application can't see itself.
    """
    metrics = GatewayMetrics()
    fleet = build_fleet(settings, metrics)
    calls = EngineCalls(settings.connect_timeout_seconds, settings.call_timeout_seconds)
    keys = None if settings.keys_path is None else KeysFile(settings.keys_path, metrics.state.keys_stale)
    tracing = open_tracing(settings.otlp_endpoint)
    intake = Intake(settings.body_room_bytes, settings.retry_after_seconds, metrics.body_bytes.set)
    limits = (settings.queue_limit, settings.open_limit, settings.retry_after_seconds)
    admission = Admission(metrics, keys, *limits, intake)
    door = Door(settings, metrics, fleet.dispatcher, admission, asyncio.Event(), tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = [] if keys is None else [asyncio.create_task(_followed(keys, settings.keys_poll_seconds))]
        async with fleet.running():
            yield
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await calls.aclose()
        await asyncio.to_thread(tracing.close)

    # FastAPI's own document would know nothing of the bodies, which this package checks.
    app = FastAPI(title="Stageline gateway", lifespan=lifespan, openapi_url=None)
    app.state.leave = door.admission.leave
    app.state.cut = door.cut
    app.state.gauges = metrics.state
    _add_completions(app, door)
    add_tokenize_routes(app, door, calls)
    add_page(app, door, PipelineWatch(calls))
    _add_models(app, door)
    _add_probes(app, door)
    _add_document(app, with_keys=keys is not None)
    add_error_forms(app)
    app.state.admin = build_admin(door)
    return app


async def _followed(keys: KeysFile, poll_seconds: float) -> None:
    await kept_going("API keys", lambda: keys.watch(poll_seconds))


def _add_completions(app: FastAPI, door: Door) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(door, prepare_chat, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(door, prepare_completion, request)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        door.caller_of(request)
        raise not_supported("The models served here generate text; none of them makes embeddings.")


def _add_models(app: FastAPI, door: Door) -> None:
    backends = door.dispatcher.backends

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        mine = filter(door.caller_of(request).may_use, backends.served.models())
        return JsonAnswer({"object": "list", "data": [describe_model(backends, name) for name in mine]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        door.caller_of(request).check_model(model)
        if model not in backends.served.models():
            raise model_not_found(model)
        return JsonAnswer(describe_model(backends, model))


def _add_probes(app: FastAPI, door: Door) -> None:
    """Enough for a load balancer; the admin port tells why."""

    @app.get("/healthz")
    async def healthz() -> Response:
        return JsonAnswer({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = not (door.admission.unwelcoming_because or why_unready(door.dispatcher.backends))
        return JsonAnswer({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)


def _add_document(app: FastAPI, with_keys: bool) -> None:
    written = JsonAnswer(document(with_keys)).body

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(written, media_type="application/json")
