"""The few calls that a kubelet makes of an API server: get, create, patch, delete, list and watch.

Plain HTTP and no part of the operator's client: tests hold the operator against what a kubelet does, so a fault of its
client must not be the kubelet's too. A call that the server refuses raises `ApiError` with the
server's own words; one that can't be made at all raises `httpx.TransportError`, and the caller tries again.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from cluster.kubelet.api_access import ApiAccess
from stageline_kubernetes.errors import ApiError

_CALL_SECONDS: Final = 15.0
WATCH_SECONDS: Final = 60
"""The server ends a watch after so long. The next one starts with a list, so that nothing missed stays missed."""
_WATCH_SILENCE_SECONDS: Final = WATCH_SECONDS + 15.0


@dataclass(frozen=True)
class Listing:
    """What a list call found, all of it."""

    items: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Change:
    """One event of a watch: `ADDED`, `MODIFIED` or `DELETED`."""

    kind: str
    item: dict[str, Any]


class ApiClient:
    """Calls of one API server. Use as an async context manager."""

    def __init__(self, access: ApiAccess) -> None:
        self._http = httpx.AsyncClient(
            base_url=access.url, headers=access.headers, verify=access.tls, timeout=_CALL_SECONDS, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, or None when there is none."""
        response = await self._http.get(path)
        return None if response.status_code == httpx.codes.NOT_FOUND else _answer(response)

    async def create(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in the collection at `path`."""
        return _answer(await self._http.post(path, json=manifest))

    async def patch(self, path: str, patch: Mapping[str, Any], content_type: str) -> dict[str, Any]:
        """Patch the object at `path`."""
        headers = {"Content-Type": content_type}
        return _answer(await self._http.patch(path, content=json.dumps(patch), headers=headers))

    async def delete(self, path: str, options: Mapping[str, Any]) -> None:
        """Delete the object at `path`; one that is not there is no error."""
        response = await self._http.request(
            "DELETE", path, json={"kind": "DeleteOptions", "apiVersion": "v1", **options}
        )
        # 409: the object there is another one than the caller meant (preconditions), so the one meant is gone.
        if response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
            _answer(response)

    async def list_and_watch(self, path: str) -> AsyncIterator[Listing | Change]:
        """All objects of a collection, then its changes until the server ends the watch."""
        listed = _answer(await self._http.get(path))
        yield Listing(tuple(listed.get("items", [])))
        query: dict[str, str | int] = {
            "watch": "true",
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": WATCH_SECONDS,
        }
        timeout = httpx.Timeout(_CALL_SECONDS, read=_WATCH_SILENCE_SECONDS)
        async with self._http.stream("GET", path, params=query, timeout=timeout) as response:
            if response.is_error:
                await response.aread()
                _answer(response)
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code", 0), event["object"].get("message", ""))
                yield Change(event["type"], event["object"])


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_success:
        return dict(response.json())
    try:
        words = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        words = response.text[:500]
    raise _refusal(response.status_code, str(words))


def _refusal(status: int, words: str) -> ApiError:
    return ApiError(f"HTTP {status}: {words}", status)
