"""Middleware by which vLLM's server rejects every request without the API key, on all paths.

vLLM's own key check covers only `/v1`, `/v2`, `/inference` and `/cohere`; the unchecked `/invocations` generates as
well. A server that has no key fails at startup, because it must not answer at all.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from stageline_vllm.server_key import KEY_VARIABLE, authorization

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_UNAUTHORIZED = b'{"error":"Unauthorized"}'
_POLICY_VIOLATION = 1008
"""Of a WebSocket; before it is accepted, a server answers 403."""


class AsksForKey:
    """For `--middleware`, which makes it the outermost: around vLLM's own, and around routes that a plugin adds."""

    def __init__(self, app: App, environ: Mapping[str, str] = os.environ) -> None:
        """Raises RuntimeError where the environment has no key."""
        key = environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: vLLM's server would answer everybody")
        self._app = app
        self._wanted = authorization(key).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_shown(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_UNAUTHORIZED))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _UNAUTHORIZED})

    def _is_shown(self, scope: Message) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted)
