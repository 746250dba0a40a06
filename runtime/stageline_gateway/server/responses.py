"""JSON responses that can't fail to be encoded, and errors in their form."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.errors import ApiError, gateway_failed
from stageline_gateway.server.sse import encode_json

logger = logging.getLogger(__name__)


class JsonAnswer(Response):
    """JSON in ASCII, so that any string a client sent can be repeated."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode `content`."""
        return encode_json(content)


def error_answer(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonAnswer:
    """`error` as a response in OpenAI's form."""
    return JsonAnswer(error.body(), status_code=error.status, headers={**(headers or {}), **error.headers()})


def add_error_forms(app: FastAPI) -> None:
    """Answer whatever goes wrong in OpenAI's form."""

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
        return error_answer(gateway_failed())
