"""Routes that the server finds by their path alone, before FastAPI and its layers: those that generate.

FastAPI knows them too, for what it says of other methods and for servers that know nothing of this. A handler here
raises nothing: all that it refuses is an answer.
"""

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, cast

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


class QuickHeaders(Headers):
    """Headers whose first values are found in one step: starlette goes through all of them for each name, and has an
    exception for each that isn't there."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._first = dict(reversed(raw))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __contains__(self, key: Any) -> bool:
        return key.lower().encode("latin-1") in self._first


class _DirectRequest(Request):
    @cached_property
    def headers(self) -> Headers:
        return QuickHeaders(self.scope["headers"])


def add_direct_post(app: FastAPI, path: str, handler: Handler) -> None:
    """Have `handler` answer each POST to exactly `path`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(_DirectRequest(scope, receive))
        await response(scope, receive, send)

    app.post(path)(handler)
    direct_posts(app)[path] = answer


def direct_posts(app: FastAPI) -> dict[str, ASGIApp]:
    """What answers POSTs, by path."""
    if not hasattr(app.state, "direct_posts"):
        app.state.direct_posts = {}
    return cast(dict[str, ASGIApp], app.state.direct_posts)
