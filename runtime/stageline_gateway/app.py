"""The gateway as an ASGI application: routes, error forms, and what lives as long as the application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stageline_gateway.admission.admission import Admission
from stageline_gateway.admission.keys_file import KeysFile
from stageline_gateway.admission.request_body import BodyMemory
from stageline_gateway.client_stream import Cut
from stageline_gateway.endpoints.admin import build_admin
from stageline_gateway.endpoints.browser_access import BrowserAccess
from stageline_gateway.endpoints.completions import add_completions
from stageline_gateway.endpoints.direct_routes import direct_posts
from stageline_gateway.endpoints.json_answers import JsonAnswer, add_error_forms
from stageline_gateway.endpoints.models import add_models, add_probes
from stageline_gateway.endpoints.openapi import document
from stageline_gateway.endpoints.page import add_page
from stageline_gateway.endpoints.pipeline_watch import PipelineWatch
from stageline_gateway.endpoints.services import Services
from stageline_gateway.endpoints.tokenizing import add_tokenize_routes
from stageline_gateway.fleet import build_fleets
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.tracing import open_tracing


def build_app(settings: GatewaySettings) -> FastAPI:
    """A gateway: the application for clients.

    `app.state.admin` is the application for the admin port, `app.state.leave` says why clients should go elsewhere,
    `app.state.drain` refuses new requests, `app.state.cut` ends open answers with an error when it is set,
    `app.state.metrics` counts what the application can't see itself, `app.state.send_timeout_seconds` and
    `app.state.hosts` are for who talks with clients.
    """
    metrics = GatewayMetrics(settings.home_namespace)
    fleets = build_fleets(settings, metrics)
    keys = None if settings.keys_path is None else KeysFile(settings.keys_path, metrics.keys_stale.set)
    bodies = BodyMemory(
        limit_bytes=settings.body_room_bytes,
        body_limit_bytes=settings.body_limit_bytes,
        timeout_seconds=settings.body_timeout_seconds,
        retry_after_seconds=settings.retry_after_seconds,
    )
    metrics.body_bytes.set_function(lambda: bodies.held_bytes)
    limits = (settings.queue_limit, settings.open_limit, settings.retry_after_seconds)
    admission = Admission(metrics, keys, *limits, bodies)
    tracing = open_tracing(settings.otlp_endpoint)
    services = Services(settings, metrics, fleets, fleets.served, admission, Cut(), tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watches: list[asyncio.Task[None]] = []
        if keys is not None:
            watch = partial(keys.watch, settings.keys_poll_seconds)
            watches.append(asyncio.create_task(run_forever("API keys", watch)))
        async with fleets.running():
            yield
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.to_thread(tracing.close)

    # FastAPI's own document would know nothing of the bodies, which this package checks.
    app = FastAPI(title="Stageline gateway", lifespan=lifespan, openapi_url=None)
    app.state.leave = admission.leave
    app.state.drain = partial(admission.close, "The gateway is draining.")
    app.state.cut = services.cut
    app.state.metrics = metrics
    app.state.send_timeout_seconds = settings.send_timeout_seconds
    app.state.hosts = settings.hosts
    add_completions(app, services)
    add_tokenize_routes(app, services)
    add_page(app, services, PipelineWatch())
    add_models(app, services)
    add_probes(app, services)
    _add_document(app, keys is not None, settings.strict_fields)
    add_error_forms(app)
    app.add_middleware(PlainPaths)
    if settings.cors_origins:
        app.add_middleware(BrowserAccess, origins=settings.cors_origins)
        posts = direct_posts(app)
        posts.update({path: BrowserAccess(post, settings.cors_origins) for path, post in posts.items()})
    app.state.admin = build_admin(services)
    app.state.admin.add_middleware(PlainPaths)
    return app


def _add_document(app: FastAPI, with_keys: bool, strict: bool) -> None:
    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(_written_document(with_keys, strict), media_type="application/json")


@cache
def _written_document(with_keys: bool, strict: bool) -> bytes:
    # Made when it is first asked for: it takes longer than the rest of a gateway's start.
    return bytes(JsonAnswer(document(with_keys, strict)).body)


class PlainPaths:
    """ASGI middleware: requests as their routes know them, without a slash at the end of the path, and HEAD as the GET
    that it asks about. The server leaves the body of an answer to HEAD out itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(_plain(scope) if scope["type"] == "http" else scope, receive, send)


def _plain(scope: Scope) -> Scope:
    """`scope` itself keeps its method: the server frames the answer by it."""
    changed: dict[str, Any] = {}
    if (path := scope["path"]).endswith("/"):
        changed["path"] = path.rstrip("/") or "/"
    if scope["method"] == "HEAD":
        changed["method"] = "GET"
    return {**scope, **changed} if changed else scope
