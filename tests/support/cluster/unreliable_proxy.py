"""A proxy before an API server that refuses requests or keeps watch events to itself, as a test asks.

Plain HTTP on loopback; it logs in with the kubeconfig it is given. Watches are streamed line by line.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from cluster.kubelet.api_access import ApiAccess, read_kubeconfig

_START_SECONDS: Final = 120.0


def _never(_method: str, _path: str) -> int:
    return 0


def _nothing(_event: Mapping[str, Any]) -> bool:
    return False


@dataclass
class ProxyRules:
    """What to do to requests; may be changed while the proxy runs."""

    refuse: Callable[[str, str], int] = _never
    """Given method and path: the status to refuse a request with, or 0."""
    retry_after_seconds: int = 1
    """How long one that is refused with 429 shall wait."""
    hides: Callable[[Mapping[str, Any]], bool] = _nothing
    """Whether a watch event is swallowed."""
    refused: list[str] = field(default_factory=list)
    """`METHOD path` of the requests refused."""


class _Proxy:
    def __init__(self, access: ApiAccess, rules: ProxyRules) -> None:
        self._access = access
        self._rules = rules
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self.listening = threading.Event()
        self.port = 0

    def run(self) -> None:
        asyncio.run(self._serve())

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        connector = aiohttp.TCPConnector(ssl=self._access.tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**21, auto_decompress=False) as session:
            self._session = session
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = int(runner.addresses[0][1])
            self.listening.set()
            await self._stop.wait()
            await runner.cleanup()
        # Encrypted connections take some more turns of the loop to close.
        await asyncio.sleep(0.25)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        status = self._rules.refuse(request.method, request.path)
        if status:
            self._rules.refused.append(f"{request.method} {request.path}")
            refusal = {"kind": "Status", "status": "Failure", "reason": "Injected", "message": "by the test"}
            headers = {"Retry-After": str(self._rules.retry_after_seconds)} if status == 429 else {}
            return web.json_response(refusal, status=status, headers=headers)
        kept = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        try:
            async with self._session.request(
                request.method,
                f"{self._access.url}{request.path_qs}",
                headers=kept | self._access.headers,
                data=await request.read() or None,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer:
                if request.query.get("watch") == "true" and answer.status == 200:
                    return await self._stream(request, answer)
                kind = answer.headers.get("Content-Type", "application/json")
                return web.Response(body=await answer.read(), status=answer.status, headers={"Content-Type": kind})
        except aiohttp.ClientError as error:
            return web.Response(text=str(error), status=502)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async for line in answer.content:
            if not self._rules.hides(json.loads(line)):
                await response.write(line)
        return response


@contextmanager
def unreliable_proxy(kubeconfig: Path, rules: ProxyRules, directory: Path) -> Iterator[Path]:
    """A proxy that lives as long as the block; yields a kubeconfig that leads through it."""
    proxy = _Proxy(read_kubeconfig(kubeconfig), rules)
    thread = threading.Thread(target=proxy.run, name="unreliable-proxy", daemon=True)
    thread.start()
    assert proxy.listening.wait(_START_SECONDS)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{proxy.port}"}}],
        "users": [{"name": "proxy", "user": {}}],
    }
    file = directory / "through-the-proxy.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        yield file
    finally:
        proxy.end()
        thread.join(timeout=20)
