"""The gateway as an ASGI application: routes, error forms, and what lives as long as the application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stageline_api.endpoints import Endpoints
from stageline_gateway.catalog import describe_model, why_unready
from stageline_gateway.completions import Door, complete, prepare_chat, prepare_completion
from stageline_gateway.discovery import EndpointsFile
from stageline_gateway.dispatch import Dispatcher
from stageline_gateway.errors import ApiError, model_not_found
from stageline_gateway.metrics import GatewayMetrics
from stageline_gateway.responses import JsonAnswer, error_answer
from stageline_gateway.routing import Ledger
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.upstream import EngineClient

logger = logging.getLogger(__name__)


def build_app(settings: GatewaySettings) -> FastAPI:
    """A gateway. `app.state.cut` is an event that ends open answers with an error when it is set."""
    metrics = GatewayMetrics()
    ledger = Ledger()
    endpoints = EndpointsFile(settings.endpoints_path, on_problem=metrics.show_stale)

    def show(current: Endpoints) -> None:
        metrics.show_endpoints(current)
        ledger.keep({group.url for group in current.groups})

    endpoints.on_change = show
    engine = EngineClient(settings.connect_timeout_seconds, settings.idle_timeout_seconds)
    dispatcher = Dispatcher(endpoints, engine, ledger, metrics, settings.retry_after_seconds)
    door = Door(settings, metrics, dispatcher, asyncio.Event())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        endpoints.refresh()
        watch = asyncio.create_task(endpoints.watch(settings.poll_seconds))
        yield
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await engine.aclose()

    # No OpenAPI page yet: the bodies are checked by this package, and a page that says less would mislead.
    app = FastAPI(title="Stageline gateway", lifespan=lifespan, openapi_url=None)
    app.state.cut = door.cut
    _add_completions(app, door)
    _add_models(app, endpoints)
    _add_probes(app, endpoints, metrics)
    _add_error_forms(app)
    return app


def _add_completions(app: FastAPI, door: Door) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(door, prepare_chat, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(door, prepare_completion, request)


def _add_models(app: FastAPI, endpoints: EndpointsFile) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JsonAnswer({"object": "list", "data": [describe_model(endpoints, name) for name in endpoints.models()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model not in endpoints.models():
            raise model_not_found(model)
        return JsonAnswer(describe_model(endpoints, model))


def _add_probes(app: FastAPI, endpoints: EndpointsFile, metrics: GatewayMetrics) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        return JsonAnswer({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = why_unready(endpoints)
        body = {"status": "not ready", "message": reason} if reason else {"status": "ready"}
        return JsonAnswer(body, status_code=503 if reason else 200)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_error_forms(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_answer(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:100]
        message = f"{error.detail}: {request.method} {path}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return error_answer(ApiError(error.status_code, message, code=code), error.headers)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        logger.error("a bug in the gateway: %s", type(error).__name__, exc_info=error)
        return error_answer(ApiError(500, "The gateway failed; its log says why.", "server_error", code="internal"))
