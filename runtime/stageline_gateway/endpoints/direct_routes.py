"""Routes that the server finds by their path alone, before FastAPI and its layers: those that generate.

FastAPI knows them too, for what it says of other methods and for servers that know nothing of this. A handler here
raises nothing: all that it refuses is an answer.
"""

from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


def add_direct_post(app: FastAPI, path: str, handler: Handler) -> None:
    """Have `handler` answer each POST to exactly `path`, or with a slash behind it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    app.post(path)(handler)
    direct_posts(app).update({path: answer, f"{path}/": answer})


def direct_posts(app: FastAPI) -> dict[str, ASGIApp]:
    """What answers POSTs, by path."""
    if not hasattr(app.state, "direct_posts"):
        app.state.direct_posts = {}
    return cast(dict[str, ASGIApp], app.state.direct_posts)
