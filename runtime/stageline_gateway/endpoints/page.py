"""The page at `/` and what it draws: three files of this package, and `GET /pipeline`.

The files hold no data and need no key; whatever the page shows it asks for with the key that its reader typed. Nothing
is fetched from anywhere else, and the browser is told to hold the page to that.
"""

from importlib.resources import files
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.endpoints.json_answers import JsonAnswer
from stageline_gateway.endpoints.pipeline_watch import MOST_WINDOW_SECONDS, NoPictureError, PipelineWatch
from stageline_gateway.endpoints.services import Services
from stageline_gateway.errors import ApiError, bad_value, not_ready, shown, wrong_value

SHORTEST_WINDOW_SECONDS: Final = 0.1
DEFAULT_WINDOW_SECONDS: Final = 4.0
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def add_page(app: FastAPI, services: Services, watch: PipelineWatch) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, files("stageline_gateway").joinpath("page_files", name).read_bytes(), media_type)

    @app.get("/pipeline")
    async def pipeline(request: Request) -> Response:
        return await _pipeline(services, watch, request)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path)
    async def answer_file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)


async def _pipeline(services: Services, watch: PipelineWatch, request: Request) -> Response:
    caller = services.admission.caller_asking(request.headers)
    model = request.query_params.get("model", "")
    served = services.served.asked_by(caller, model, services.settings.retry_after_seconds)
    fleet = services.fleets.by_namespace[served.namespace]
    window_seconds = _window(request.query_params.get("window_seconds"))
    wanted = request.query_params.get("group")
    groups = fleet.discovered.groups_of(served.name)
    group = next((one for one in groups if wanted is None or str(one.group) == wanted), None)
    if group is None:
        raise bad_value("group", f"= {shown(wanted)} is no group of this model")
    try:
        drawn = await watch.picture(fleet.calls, group, window_seconds)
    except NoPictureError as error:
        raise not_ready(str(error), services.settings.retry_after_seconds) from None
    except ApiError as error:  # an engine that is gone is not the client's fault, nor this gateway's
        raise not_ready(error.message, services.settings.retry_after_seconds) from None
    return JsonAnswer({"model": model, "group": group.group, "incarnation": group.incarnation} | drawn)


def _window(text: str | None) -> float:
    try:
        seconds = DEFAULT_WINDOW_SECONDS if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not SHORTEST_WINDOW_SECONDS <= seconds <= MOST_WINDOW_SECONDS:
        rule = f"a number from {SHORTEST_WINDOW_SECONDS:g} to {MOST_WINDOW_SECONDS:g}"
        raise wrong_value("window_seconds", f"should be {rule}", text)
    return seconds
