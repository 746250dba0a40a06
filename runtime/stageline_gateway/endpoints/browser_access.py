"""Cross-origin requests (CORS) of web pages whose origins are listed; off unless some are.

A page sends its key itself, so no cookies are allowed. The headers are added to the connection's own, since streams
are written past ASGI.
"""

import re
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stageline_gateway.client_stream import client_of
from stageline_gateway.origins import ANY_ORIGIN, is_origin

_NAMES: Final = re.compile(r"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED: Final = (
    "x-request-id, request-id, x-stageline-ignored, x-stageline-resumed, retry-after, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_MAX_AGE_SECONDS: Final = 600


class BrowserAccess:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (allowed := self._allowed(headers.get("origin"))) is None:
            await self._app(scope, receive, send)
            return
        said = {"access-control-allow-origin": allowed, "vary": "Origin"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = Response(status_code=204, headers=said | _preflight(headers))
            await answer(scope, receive, send)
            return
        said["access-control-expose-headers"] = _EXPOSED
        client_of(scope).add_headers([(name.encode(), value.encode()) for name, value in said.items()])
        await self._app(scope, receive, send)

    def _allowed(self, origin: str | None) -> str | None:
        if origin is None or not is_origin(origin):
            return None
        return ANY_ORIGIN if ANY_ORIGIN in self._origins else origin if origin in self._origins else None


def _preflight(headers: Headers) -> dict[str, str]:
    """`*` would not stand for Authorization, so the headers that are asked for are allowed by name."""
    asked = headers.get("access-control-request-headers", "")
    names = {"access-control-allow-headers": asked} if _NAMES.fullmatch(asked) else {}
    return {
        "access-control-allow-methods": _METHODS,
        "access-control-max-age": str(_MAX_AGE_SECONDS),
        **names,
    }
