"""Short requests to an engine or a stage: one JSON body out, one back, bounded in time and in bytes.

An answer of megabytes, such as the ids of a long prompt, is read outside the event loop. The caller is notified of its
bytes as they arrive, so that it can reject the answer before all of it has arrived.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import httpx

from stageline_api.engine_http import EngineError
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineTrust, by_name
from stageline_gateway.errors import ApiError, answer_broken, refused_by_engine
from stageline_gateway.large_work import off_the_loop

ANSWER_LIMIT_BYTES: Final = 64 * 1024 * 1024

Answer = TypeVar("Answer")
Read = Callable[[bytearray], Answer]
"""Reads the answer's JSON; raises ValueError."""


class EngineCalls:
    """Asks over connections that are kept open; raises ApiError. Never goes through a proxy from the environment."""

    def __init__(
        self,
        key: EngineKey,
        trust: EngineTrust,
        connect_timeout_seconds: float,
        timeout_seconds: float,
        retry_after_seconds: float = 2.0,
    ) -> None:
        self._key = key
        self._timeout_seconds = timeout_seconds
        self._retry_after_seconds = retry_after_seconds
        self._http = httpx.AsyncClient(
            verify=trust.context,
            timeout=httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, url: str, read: Read[Answer], *, is_engine: bool = True, tls_name: str = "") -> Answer:
        """A stage is asked without the engine's key. By HTTPS, the certificate must be for `tls_name`."""
        headers = self._key.headers if is_engine else {}
        extensions = by_name(tls_name)
        return await self._ask(httpx.Request("GET", url, headers=headers, extensions=extensions), read)

    async def post(
        self,
        url: str,
        body: bytes,
        read: Read[Answer],
        names: Mapping[str, str],
        tls_name: str = "",
        count: Callable[[int], None] = lambda _: None,
    ) -> Answer:
        """`body` is JSON. `count` is called with the answer's bytes as they arrive, and may raise."""
        headers = {"content-type": "application/json", **names, **self._key.headers}
        extensions = by_name(tls_name)
        request = httpx.Request("POST", url, content=body, headers=headers, extensions=extensions)
        return await self._ask(request, read, count)

    async def _ask(
        self, request: httpx.Request, read: Read[Answer], count: Callable[[int], None] = lambda _: None
    ) -> Answer:
        try:
            response = await self._http.send(request, stream=True)
            try:
                content = await _read(response, count)
            finally:
                await response.aclose()
                # The two reference each other: both, and the request's body, would wait for the garbage collector.
                del response.stream
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
            # The connection was accepted, so the engine is up and works on earlier requests.
            message = f"The engine is busy: it did not answer within {self._timeout_seconds:g} s."
            raise ApiError(
                503, message, "server_error", code="overloaded", retry_after_seconds=self._retry_after_seconds
            ) from None
        except httpx.HTTPError:
            raise answer_broken("The engine does not answer.") from None
        try:
            if response.status_code == httpx.codes.OK:
                return await off_the_loop(len(content), lambda: read(content))
            refusal = EngineError.from_json(content)
        except ValueError:
            raise answer_broken("The engine's answer can't be read.") from None
        raise refused_by_engine(refusal, "prompt", 1.0)


async def _read(response: httpx.Response, count: Callable[[int], None]) -> bytearray:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        if len(content) + len(chunk) > ANSWER_LIMIT_BYTES:
            raise answer_broken("The engine's answer is too long.")
        count(len(chunk))
        content += chunk
    return content
