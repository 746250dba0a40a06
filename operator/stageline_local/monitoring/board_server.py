"""HTTP server of the boards page: its files, the boards' JSON, and a read-only proxy to Prometheus.

Listens on loopback and only serves requests for a loopback host name, so that pages of other sites can't read through
it (DNS rebinding). Only read-only query paths are passed on to Prometheus.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from stageline_api.errors import UserError
from stageline_local.monitoring.scrape import OPERATOR_PATH

_FILES: Final = Path(str(resources.files("stageline_local.monitoring"))) / "page_files"
_RUNBOOKS: Final = _FILES.parents[3] / "docs" / "runbooks"
_READ_ONLY: Final = frozenset({"query", "query_range", "series", "labels", "alerts", "rules", "targets", "metadata"})
_LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_QUERY_TIMEOUT: Final = ClientTimeout(total=30.0)
_HEADERS: Final = {
    # plotly sets its own inline styles; everything else comes from this server.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class BoardServer:
    """Serves the page on 127.0.0.1 until closed."""

    def __init__(
        self,
        boards: tuple[Path, ...],
        plotly: Path,
        prometheus_url: str,
        facts: Mapping[str, Any],
        operator_metrics: Callable[[str], tuple[bytes, str]],
    ) -> None:
        """`facts` is the page's data besides the boards; `operator_metrics` renders the operator's metrics in an
        accepted format.
        """
        self._boards = {path.stem: path for path in boards}
        self._prometheus_url = prometheus_url
        self._facts = facts
        self._operator_metrics = operator_metrics
        self._prometheus: ClientSession | None = None
        app = web.Application(middlewares=[_only_loopback_names])
        for file in sorted(_FILES.iterdir()):
            app.router.add_get("/" if file.name == "index.html" else f"/{file.name}", _sender(file))
        app.router.add_get("/plotly.min.js", _sender(plotly))
        app.router.add_get("/docs/runbooks/{name}", self._runbook)
        app.router.add_get("/facts", self._tell_facts)
        app.router.add_get("/boards/{name}", self._board)
        app.router.add_get("/prometheus/api/v1/{query:.+}", self._query)
        app.router.add_post("/prometheus/api/v1/{query:.+}", self._query)
        app.router.add_get(OPERATOR_PATH, self._operator)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, port: int) -> None:
        """Listen; raises `UserError` if the port is in use."""
        self._prometheus = ClientSession(timeout=_QUERY_TIMEOUT)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        except OSError as error:
            await self.close()
            raise UserError(
                f"can't listen on 127.0.0.1:{port}: {error.strerror}; choose another --monitor-port"
            ) from error

    async def close(self) -> None:
        await self._runner.cleanup()
        if self._prometheus is not None:
            await self._prometheus.close()

    async def _tell_facts(self, _: web.Request) -> web.Response:
        boards = [
            {"name": name} | {key: _read(path).get(key) for key in ("title", "uid")}
            for name, path in self._boards.items()
        ]
        return web.json_response({**self._facts, "boards": boards}, headers=_HEADERS)

    async def _board(self, request: web.Request) -> web.Response:
        path = self._boards.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound(text=f"there is no board {request.match_info['name']!r}\n")
        return web.json_response(_read(path), headers=_HEADERS)

    async def _runbook(self, request: web.Request) -> web.Response:
        """An alert's runbook as Markdown, if this installation has it: alerts link to this path."""
        name = request.match_info["name"]
        known = {path.name: path for path in _RUNBOOKS.glob("*.md")}
        if name not in known:
            raise web.HTTPNotFound(
                text=f"this installation has no runbook {name!r}; see docs/runbooks in the sources\n"
            )
        return web.Response(text=known[name].read_text(encoding="utf-8"), headers=_HEADERS)

    async def _operator(self, request: web.Request) -> web.Response:
        body, content_type = self._operator_metrics(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _query(self, request: web.Request) -> web.Response:
        """One query, passed on unchanged. The response has Prometheus' format even if Prometheus does not answer."""
        query = request.match_info["query"]
        if query not in _READ_ONLY and not _is_label_values(query):
            return _problem(403, "forbidden", f"{query!r} is not one of the queries that the boards need")
        assert self._prometheus is not None
        form = dict(await request.post()) if request.method == "POST" else None
        try:
            async with self._prometheus.request(
                request.method, f"{self._prometheus_url}/api/v1/{query}", params=request.query, data=form
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except (ClientError, TimeoutError) as error:
            return _problem(502, "unavailable", f"Prometheus does not answer: {error or type(error).__name__}")


def _is_label_values(query: str) -> bool:
    parts = query.split("/")
    return len(parts) == 3 and parts[0] == "label" and parts[1].isidentifier() and parts[2] == "values"


def _problem(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"status": "error", "errorType": kind, "error": message}, status=status)


def _read(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def _sender(file: Path) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def send(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(file, headers=_HEADERS)

    return send


@web.middleware
async def _only_loopback_names(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse a site that resolves its name to this machine (DNS rebinding): its requests carry that name."""
    name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
    if name not in _LOOPBACK_NAMES:
        raise web.HTTPForbidden(text="use 127.0.0.1 or localhost\n")
    return await handler(request)
