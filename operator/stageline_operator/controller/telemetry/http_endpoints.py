"""`/metrics`, `/healthz` and `/readyz` of the operator.

Healthy: the event loop responds and no pass hangs. Ready: the cluster has been listed and every watch runs. A replica
that waits for the lease also watches, so the same conditions apply.
"""

from collections.abc import Callable

from aiohttp import web

from stageline_api.errors import UserError
from stageline_api.telemetry.metric_registry import MetricRegistry

Verdict = Callable[[], str]
"""Returns the problem, or an empty string."""


class HttpEndpoints:
    """A small server; `start` binds, `close` ends it."""

    def __init__(self, registry: MetricRegistry, unhealthy: Verdict, unready: Verdict) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        self._registry = registry
        self._unhealthy = unhealthy
        self._unready = unready
        self._runner = web.AppRunner(app, access_log=None)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 picks a free one and stores it in `port`. Raises `UserError`."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"can't listen on {host}:{port}: {error.strerror}; choose another --metrics-port"
            ) from error
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._registry.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        return _verdict(self._unhealthy())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _verdict(self._unready())


def _verdict(problem: str) -> web.Response:
    return web.Response(text=(problem or "ok") + "\n", status=503 if problem else 200)
