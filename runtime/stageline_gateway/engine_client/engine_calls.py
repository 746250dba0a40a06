"""Short questions to an engine or a stage: one JSON body there, one back, bounded in time and in bytes.

An answer of megabytes, such as the ids of a long prompt, is read beside the loop, and whoever asked is told of its
bytes as they come, so that it can be refused before it is all here.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stageline_api.engine_http import EngineError
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineTrust, by_name
from stageline_gateway.errors import answer_broken, refused_by_engine
from stageline_gateway.large_work import off_the_loop

ANSWER_LIMIT_BYTES: Final = 64 * 1024 * 1024

Answer = TypeVar("Answer", bound=BaseModel)


class EngineCalls:
    """Asks over connections that are kept open; raises ApiError. Never goes through a proxy from the environment."""

    def __init__(
        self, key: EngineKey, trust: EngineTrust, connect_timeout_seconds: float, timeout_seconds: float
    ) -> None:
        self._key = key
        self._http = httpx.AsyncClient(
            verify=trust.context,
            timeout=httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, url: str, answer: type[Answer], *, is_engine: bool = True, tls_name: str = "") -> Answer:
        """A stage is asked without the engine's key. By HTTPS, the certificate must be for `tls_name`."""
        headers = self._key.headers if is_engine else {}
        extensions = by_name(tls_name)
        return await self._ask(httpx.Request("GET", url, headers=headers, extensions=extensions), answer)

    async def post(
        self,
        url: str,
        body: bytes,
        answer: type[Answer],
        names: Mapping[str, str],
        tls_name: str = "",
        count: Callable[[int], None] = lambda _: None,
    ) -> Answer:
        """`body` is JSON. `count` is told of the answer's bytes as they come, and may raise."""
        headers = {"content-type": "application/json", **names, **self._key.headers}
        extensions = by_name(tls_name)
        request = httpx.Request("POST", url, content=body, headers=headers, extensions=extensions)
        return await self._ask(request, answer, count)

    async def _ask(
        self, request: httpx.Request, answer: type[Answer], count: Callable[[int], None] = lambda _: None
    ) -> Answer:
        try:
            response = await self._http.send(request, stream=True)
            try:
                content = await _read(response, count)
            finally:
                await response.aclose()
                # It holds the response in turn: both, and the request's body, would wait for the garbage collector.
                del response.stream
        except httpx.HTTPError:
            raise answer_broken("The engine does not answer.") from None
        try:
            if response.status_code == httpx.codes.OK:
                return await _parsed(answer, content)
            refusal = EngineError.model_validate_json(content)
        except ValidationError:
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


async def _parsed(answer: type[Answer], content: bytearray) -> Answer:
    return await off_the_loop(len(content), lambda: answer.model_validate_json(content))
