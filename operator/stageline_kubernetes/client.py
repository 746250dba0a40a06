"""An API client for processes with an event loop; it takes and returns plain manifests.

Each write first calls `before_write`, which stops a replica that does not lead, and simulates a crash in tests. While a
write waits for its response, `during_write` is called every second; if it raises, the write is abandoned. A throttled
request waits as long as the server asks, without delaying other requests. A request that fails with a transient error
is retried a few times. So each write must be safe to repeat, whether its response was lost or it was never sent.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.rest import RESTResponse

from stageline_kubernetes.errors import ApiError, error_of
from stageline_kubernetes.resources import ApiResource

JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"

READ_TIMEOUT_SECONDS: Final = 30.0
_TRIES: Final = 3
_FIRST_RETRY_SECONDS: Final = 0.25
_LONGEST_RETRY_SECONDS: Final = 5.0
_RETRY_WITHIN_SECONDS: Final = 10.0
"""After this time a request is not retried: its caller decides."""
_DURING_WRITE_SECONDS: Final = 1.0
_PAGE: Final = 500
_FIRST_REFUSAL: Final = 300
_BAD_ANSWER: Final = 502
"""Status of a malformed response, which no API server sends but a proxy may."""
_CLOSE_SECONDS: Final = 0.25

OnCall = Callable[[str, str, int], None]
"""Called for each request, and each failed watch: verb, plural, status."""


@dataclass(frozen=True)
class Listing:
    """Objects of a kind, and the resourceVersion of the list."""

    items: Sequence[Mapping[str, Any]]
    version: int


@dataclass(frozen=True)
class _Request:
    verb: str
    plural: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    content_type: str = JSON
    timeout_seconds: float = READ_TIMEOUT_SECONDS

    @property
    def what(self) -> str:
        return f"{self.verb} {self.plural}{self.path.rpartition('/' + self.plural)[2].replace('/', ' ')}"

    @property
    def path_and_query(self) -> str:
        given = {name: value for name, value in self.query.items() if value}
        return self.path + (f"?{urlencode(given)}" if given else "")


class KubeApi:
    """One API server. Create and close it inside the event loop that uses it."""

    def __init__(
        self,
        configuration: Configuration,
        write_timeout_seconds: float = READ_TIMEOUT_SECONDS,
        read_timeout_seconds: float = READ_TIMEOUT_SECONDS,
        before_write: Callable[[str], None] = lambda _: None,
        during_write: Callable[[str], None] = lambda _: None,
        on_call: OnCall = lambda *_: None,
        tries: int = _TRIES,
        *,
        user_agent: str,
    ) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self._write_timeout_seconds = write_timeout_seconds
        self._read_timeout_seconds = read_timeout_seconds
        self._before_write = before_write
        self._during_write = during_write
        self._on_call = on_call
        self._tries = tries
        self._user_agent = user_agent

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]
        # Closed TLS connections need a few more iterations of the loop to end.
        await asyncio.sleep(_CLOSE_SECONDS)

    async def get(self, resource: ApiResource, namespace: str, name: str) -> dict[str, Any]:
        """Raises `ApiError`."""
        return await self._read("get", resource, resource.path(namespace, name), {})

    async def list(
        self, resource: ApiResource, namespace: str = "", selector: str = "", limit: int | None = None, fields: str = ""
    ) -> Listing:
        """A consistent list of all objects, in pages; with `limit`, the first ones. Raises `ApiError`.

        `selector` is a label selector, `fields` a field selector.
        """
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {
                "limit": str(limit or _PAGE),
                "labelSelector": selector,
                "fieldSelector": fields,
                "continue": token,
            }
            page = await self._read("list", resource, resource.path(namespace), query)
            if not isinstance(page.get("metadata"), dict):
                raise ApiError(f"list {resource.plural}: the answer is no list", _BAD_ANSWER)
            found += page.get("items") or []
            token = page["metadata"].get("continue", "")
            if not token or limit is not None:
                return Listing(found, int(page["metadata"].get("resourceVersion") or 0))

    async def watch(
        self, resource: ApiResource, namespace: str, selector: str, version: int, seconds: int
    ) -> AsyncGenerator[Sequence[dict[str, Any]], None]:
        """Events after a resourceVersion, in batches as they arrive, for `seconds`; then the server ends it.

        The first batch is empty: the watch is open. Raises `ApiError`, also for an event of type `ERROR`; with status 0
        if the connection broke.
        """
        query = {
            "watch": "true",
            "resourceVersion": str(version),
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "labelSelector": selector,
        }
        limit_seconds = seconds + self._read_timeout_seconds
        request = _Request(
            "watch", resource.plural, "GET", resource.path(namespace), query, timeout_seconds=limit_seconds
        )
        try:
            async with asyncio.timeout(limit_seconds):
                answer = await self._open(request)
                async with answer.response as response:
                    if response.status >= _FIRST_REFUSAL:
                        answered = _decoded(await response.read())
                        raise error_of(request.what, response.status, answered, response.headers, False)
                    yield []
                    rest = b""
                    async for chunk in response.content.iter_any():
                        *lines, rest = (rest + chunk).split(b"\n")
                        if lines:
                            yield [_event(request.what, line) for line in lines]
        except ApiError as error:
            self._on_call(request.verb, request.plural, error.status)
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._on_call(request.verb, request.plural, 0)
            raise _no_answer(request, error) from error

    async def create(
        self, resource: ApiResource, manifest: Mapping[str, Any], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """Create an object. Raises `ApiError`; a conflict means that it exists."""
        path = resource.path(manifest["metadata"].get("namespace", ""))
        return await self._write(resource, _Request("create", resource.plural, "POST", path, query, manifest))

    async def patch(
        self, resource: ApiResource, path: str, body: Any, content_type: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """Patch an object, by one of the API's four patch types. Raises `ApiError`."""
        return await self._write(resource, _Request("patch", resource.plural, "PATCH", path, query, body, content_type))

    async def replace(self, resource: ApiResource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the version of an object that `manifest` names. Raises `ApiError`."""
        metadata = manifest["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._write(resource, _Request("update", resource.plural, "PUT", path, {}, manifest))

    async def delete(
        self, resource: ApiResource, namespace: str, name: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Request a deletion. Raises `ApiError`; a conflict means that a precondition in `options` does not hold."""
        path = resource.path(namespace, name)
        return await self._write(resource, _Request("delete", resource.plural, "DELETE", path, {}, options))

    async def _read(self, verb: str, resource: ApiResource, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        request = _Request(verb, resource.plural, "GET", path, query, timeout_seconds=self._read_timeout_seconds)
        return await self._send(request, resource, asks=False)

    async def _write(self, resource: ApiResource, request: "_Request") -> dict[str, Any]:
        return await self._send(replace(request, timeout_seconds=self._write_timeout_seconds), resource, asks=True)

    async def _send(self, request: "_Request", resource: ApiResource, asks: bool) -> dict[str, Any]:
        began = asyncio.get_running_loop().time()
        for tries_left in reversed(range(self._tries)):
            if asks:
                self._before_write(request.what)
            try:
                return await self._send_once(request, resource.kind == "Secret", asks)
            except ApiError as error:
                own_seconds = _FIRST_RETRY_SECONDS * 2 ** (self._tries - tries_left)
                wait_seconds = error.retry_after_seconds or own_seconds * random.uniform(0.5, 1.0)
                is_late = asyncio.get_running_loop().time() - began > _RETRY_WITHIN_SECONDS
                if not error.is_passing or not tries_left or is_late or wait_seconds > _LONGEST_RETRY_SECONDS:
                    raise
            await asyncio.sleep(wait_seconds)
        raise AssertionError("the last try returns or raises")

    async def _send_once(self, request: "_Request", hides_message: bool, asks: bool) -> dict[str, Any]:
        try:
            # The login counts too: no request may be sent long after `before_write` allowed it.
            async with asyncio.timeout(request.timeout_seconds):
                answer, raw = await (self._exchange_while_allowed(request) if asks else self._exchange(request))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._on_call(request.verb, request.plural, 0)
            raise _no_answer(request, error) from error
        self._on_call(request.verb, request.plural, answer.status)
        decoded = _decoded(raw)
        if answer.status >= _FIRST_REFUSAL:
            raise error_of(request.what, answer.status, decoded, answer.headers, hides_message)
        return decoded

    async def _exchange(self, request: "_Request") -> tuple[RESTResponse, bytes]:
        answer = await self._open(request)
        return answer, await answer.read()  # type: ignore[no-untyped-call]

    async def _exchange_while_allowed(self, request: "_Request") -> tuple[RESTResponse, bytes]:
        """Raises the error of `during_write`; the API server abandons a request after its client disconnects."""
        exchange = asyncio.ensure_future(self._exchange(request))
        try:
            while not (await asyncio.wait({exchange}, timeout=_DURING_WRITE_SECONDS))[0]:
                self._during_write(request.what)
            return exchange.result()
        finally:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)

    async def _open(self, request: "_Request") -> RESTResponse:
        """Send a request; returns at the status, before the body is read."""
        headers = {"Accept": JSON, "Content-Type": request.content_type, "User-Agent": self._user_agent}
        headers |= await self._authorization()
        url = f"{self._configuration.host}{request.path_and_query}"
        timeout = request.timeout_seconds
        return await self._client.call_api(request.method, url, headers, request.body, _request_timeout=timeout)

    async def _authorization(self) -> dict[str, str]:
        try:
            token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        except Exception as error:  # login helpers raise any exception
            raise ApiError(f"log in: {type(error).__name__}: {error}"[:300], 0, type(error).__name__) from error
        if token:
            return {"Authorization": token}
        if self._configuration.username:
            return {"Authorization": str(self._configuration.get_basic_auth_token())}
        return {}


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError:
        return {"message": raw[:200].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}


def _no_answer(request: _Request, error: Exception) -> ApiError:
    reason = type(error).__name__
    words = f"within {request.timeout_seconds:g} s" if isinstance(error, TimeoutError) else f"{reason} {error}"
    return ApiError(f"{request.what}: no answer {words}".rstrip(), 0, reason)


def _event(what: str, line: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
        kind, about = event["type"], dict(event["object"])
    except (ValueError, KeyError, TypeError) as error:
        raise ApiError(f"{what}: an event can't be parsed: {error}", _BAD_ANSWER) from error
    if kind == "ERROR":
        raise error_of(what, int(about.get("code") or _BAD_ANSWER), about, {}, hide_message=False)
    return event
