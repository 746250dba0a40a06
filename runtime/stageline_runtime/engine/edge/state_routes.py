"""The engine's own state, for probes, Prometheus, the operator and people: read-only GETs.

The same routes are on two ports. On the engine's own port a caller needs a key, as for all its routes except
probes. The state port has only these routes and needs no key, so that a scraper can't generate.
"""

from collections.abc import Callable

from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel

from stageline_api.engine_access import why_unwelcome
from stageline_api.engine_http import ErrorCode, Wire
from stageline_api.health import Phase
from stageline_api.telemetry.timeline import GroupClocks, GroupStages
from stageline_runtime.engine.core_api import EngineCoreApi
from stageline_runtime.engine.edge.http_errors import internal_error_response, refusal_response
from stageline_runtime.engine.errors import EngineRefusal


class UnwelcomeError(Exception):
    """The request comes from a web page."""


def build_state_app(
    core: EngineCoreApi, stages: Callable[[], GroupStages], clocks: Callable[[], GroupClocks]
) -> FastAPI:
    """The application of the port without keys."""
    app = FastAPI(title="stageline engine's state", openapi_url=None, dependencies=[Depends(_check_page)])
    add_error_answers(app)
    add_state_routes(app, core)
    add_stage_routes(app, stages, clocks)
    return app


async def _check_page(request: Request) -> None:
    """Raises UnwelcomeError for a request that a web page makes."""
    reason = why_unwelcome(request.headers)
    if reason is not None:
        raise UnwelcomeError(reason)


def add_state_routes(app: FastAPI, core: EngineCoreApi) -> None:
    @app.get("/status")
    async def status() -> Response:
        return json_answer(core.status())

    @app.get("/healthz")
    async def healthz() -> Response:
        """Liveness probe: alive unless failed."""
        state = core.status()
        return json_answer(state, 503 if state.phase is Phase.FAILED else 200)

    @app.get("/readyz")
    async def readyz() -> Response:
        """Ready for new requests: neither starting, draining nor failed. The body says which."""
        state = core.status()
        return json_answer(state, 200 if state.phase is Phase.READY else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, content_type = core.metrics_page(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def add_stage_routes(app: FastAPI, stages: Callable[[], GroupStages], clocks: Callable[[], GroupClocks]) -> None:
    """Add both; each answers with the current state, even while the group still forms."""

    @app.get("/stages")
    async def answer_stages() -> Response:
        return json_answer(stages())

    @app.get("/clock")
    async def answer_clock() -> Response:
        return json_answer(clocks())


def add_error_answers(app: FastAPI) -> None:
    """What is not a route's answer has an `EngineError` or a `Failed` as its body too."""

    @app.exception_handler(404)
    async def answer_unknown_path(request: Request, _error: Exception) -> Response:
        return refusal_response(EngineRefusal(ErrorCode.NOT_FOUND, f"There is no {request.url.path!r} here."))

    @app.exception_handler(UnwelcomeError)
    async def answer_unwelcome(_request: Request, error: Exception) -> Response:
        return refusal_response(EngineRefusal(ErrorCode.INVALID_VALUE, str(error)), 403)

    @app.exception_handler(405)
    async def answer_wrong_method(request: Request, error: Exception) -> Response:
        message = f"{request.method} is not allowed on {request.url.path!r}."
        response = refusal_response(EngineRefusal(ErrorCode.METHOD_NOT_ALLOWED, message))
        response.headers["Allow"] = (getattr(error, "headers", None) or {}).get("Allow", "")
        return response

    @app.exception_handler(Exception)
    async def answer_bug(_request: Request, _error: Exception) -> Response:
        return internal_error_response()


def json_answer(model: BaseModel | Wire, status: int = 200) -> Response:
    body = model.to_json() if isinstance(model, Wire) else model.model_dump_json()
    return Response(body, status_code=status, media_type="application/json")
