"""The gateway as an ASGI application: routes, error forms, and what lives as long as the application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial

from fastapi import FastAPI
from starlette.responses import Response

from stageline_gateway.admission.admission import Admission
from stageline_gateway.admission.keys_file import KeysFile
from stageline_gateway.admission.request_body import BodyMemory
from stageline_gateway.client_stream import Cut
from stageline_gateway.endpoints.admin import build_admin
from stageline_gateway.endpoints.anthropic_messages import add_messages
from stageline_gateway.endpoints.completions import add_completions
from stageline_gateway.endpoints.json_answers import JsonAnswer, add_error_forms
from stageline_gateway.endpoints.models import add_models, add_probes
from stageline_gateway.endpoints.openapi import document
from stageline_gateway.endpoints.page import add_page
from stageline_gateway.endpoints.pipeline_watch import PipelineWatch
from stageline_gateway.endpoints.responses import add_responses
from stageline_gateway.endpoints.services import Services
from stageline_gateway.endpoints.tokenizing import add_tokenize_routes
from stageline_gateway.fleet import build_fleets
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.tracing import open_tracing
from stageline_gateway.whole import Place


def build_app(settings: GatewaySettings, place: Place | None = None) -> FastAPI:
    """A gateway, or the worker of one at `place`: the application for clients.

    `app.state.admin` is the application for the admin port, `app.state.leave` says why clients should go elsewhere,
    `app.state.cut` ends open answers with an error when it is set, `app.state.metrics` counts what the
    application can't see itself, `app.state.send_timeout_seconds` and `app.state.hosts` are for who talks with clients.
    """
    place = place or Place()
    metrics = GatewayMetrics(settings.home_namespace)
    fleets = build_fleets(settings, metrics)
    keys = None if settings.keys_path is None else KeysFile(settings.keys_path, metrics.keys_stale.set)
    bodies = BodyMemory(
        limit_bytes=settings.body_room_bytes,
        body_limit_bytes=settings.body_limit_bytes,
        timeout_seconds=settings.body_timeout_seconds,
        retry_after_seconds=settings.retry_after_seconds,
    )
    metrics.body_bytes.set_function(lambda: bodies.held_here_bytes)
    limits = (settings.queue_limit, settings.open_limit, settings.retry_after_seconds)
    admission = Admission(metrics, keys, *limits, bodies, place.books)
    tracing = open_tracing(settings.otlp_endpoint, place.worker)
    whole = place.whole(metrics)
    services = Services(settings, metrics, fleets, fleets.served, admission, Cut(), whole, tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watches: list[asyncio.Task[None]] = []
        if keys is not None:
            watch = partial(keys.watch, settings.keys_poll_seconds)
            watches.append(asyncio.create_task(run_forever("API keys", watch)))
        async with fleets.running():
            await fleets.first_read(place.first_read_seconds)
            yield
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.to_thread(tracing.close)

    # FastAPI's own document would know nothing of the bodies, which this package checks.
    app = FastAPI(title="Stageline gateway", lifespan=lifespan, openapi_url=None)
    app.state.leave = admission.leave
    app.state.cut = services.cut
    app.state.metrics = metrics
    app.state.send_timeout_seconds = settings.send_timeout_seconds
    app.state.hosts = settings.hosts
    add_completions(app, services)
    add_responses(app, services)
    add_messages(app, services)
    add_tokenize_routes(app, services)
    add_page(app, services, PipelineWatch())
    add_models(app, services)
    add_probes(app, services)
    _add_document(app, keys is not None, settings.strict_fields)
    add_error_forms(app)
    app.state.admin = build_admin(services)
    return app


def _add_document(app: FastAPI, with_keys: bool, strict: bool) -> None:
    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(_written_document(with_keys, strict), media_type="application/json")


@cache
def _written_document(with_keys: bool, strict: bool) -> bytes:
    # Made when it is first asked for: it takes longer than the rest of a gateway's start.
    return bytes(JsonAnswer(document(with_keys, strict)).body)
