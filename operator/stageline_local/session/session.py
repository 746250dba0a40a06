"""One PipelineModel on this machine: store, node, reconciler and gateway, from start to a clean end.

`run` returns when no process, port or address of the session is left. A display reads `status`, `readings` and the
node's pods; `on_change` is called when one of them may have changed.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from stageline_api import env
from stageline_api.engine_access import authorization
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.monitoring.watcher import watcher_of
from stageline_local.node.addresses import can_bind
from stageline_local.node.container import ContainerCommand
from stageline_local.node.images import LocalImages, machine_environment
from stageline_local.node.pod_status import Terminated
from stageline_local.node.process_node import ProcessNode
from stageline_local.node.supervised_process import SupervisedProcess
from stageline_local.session.endpoints_file import group_endpoints, write_endpoints
from stageline_local.session.local_overrides import LOCAL_IMAGE, THIS_MACHINE, with_shared_machine
from stageline_local.session.object_store import ObjectStore
from stageline_local.session.reconcile import Reconciler
from stageline_local.session.stage_polling import Readings, poll
from stageline_local.session.state_file import STATE_FILE, StateRecorder
from stageline_operator.planner.objects import build_engine_keys_secret
from stageline_operator.planner.types import PlannedEvent, Setting

_POLL_SECONDS: Final = 0.5
_GATEWAY_GRACE_SECONDS: Final = 10.0
_GATEWAY_DRAIN_SECONDS: Final = 1.0
"""Requests had the model's drain time before the gateway stops. A request that is still open gets an error event, which
the gateway must send within its grace period.
"""


@dataclass(frozen=True)
class SessionOptions:
    """The session's files and addresses."""

    state_dir: Path
    host: str
    port: int
    gateway_argv: tuple[str, ...] = ("stageline", "gateway")
    images: LocalImages = field(default_factory=lambda: LocalImages(frozenset({LOCAL_IMAGE}), machine_environment()))
    monitor: MonitorOptions | None = None
    """None: no Prometheus, no boards."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"http://{host}:{self.port}"

    @property
    def endpoints_path(self) -> Path:
        return self.state_dir / "endpoints.json"


class LocalSession:
    """Serves one model. Create and use it inside one event loop, in the main thread."""

    def __init__(
        self,
        model: PipelineModel,
        options: SessionOptions,
        given_secrets: tuple[dict[str, Any], ...] = (),
        on_change: Callable[[], None] = lambda: None,
        on_event: Callable[[PlannedEvent], None] = lambda _: None,
        on_gateway_end: Callable[[Terminated], None] = lambda _: None,
        on_prometheus_end: Callable[[Terminated], None] = lambda _: None,
    ) -> None:
        """Raises `UserError` if it is to be monitored and the requirements are not installed."""
        self.model = model
        self.options = options
        self.readings = Readings()
        self._on_change = on_change
        self._draining = False
        self._on_event = on_event
        self._recorder = StateRecorder(options.state_dir / STATE_FILE, model)
        self._store = store = ObjectStore()
        self._engine_key = secrets.token_urlsafe(32)
        store.apply(build_engine_keys_secret(model, self._engine_key))
        for secret in given_secrets:
            store.apply(secret)
        images = with_shared_machine(options.images, model)
        self.node = ProcessNode(options.state_dir, store, images, self._pods_changed)
        admin_port = None if options.monitor is None else _port_for_metrics(options)
        self.watcher = watcher_of(model, options.monitor, options.state_dir, admin_port, on_prometheus_end)
        self._reconciler = Reconciler(
            model,
            store,
            self.node,
            Setting(LOCAL_IMAGE, pod_host=THIS_MACHINE),
            self._status_changed,
            self._take_event,
            self.watcher.pass_done,
        )
        self._gateway = SupervisedProcess("gateway", self._gateway_command(admin_port), on_gateway_end)

    @property
    def status(self) -> PipelineModelStatus:
        return self._reconciler.status

    @property
    def gateway_pid(self) -> int | None:
        return self._gateway.pid

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain and end everything. Raises `UserError` for a pod that the node refuses."""
        await self.watcher.start()
        self._publish()
        self._gateway.start()
        reconciling = asyncio.create_task(self._reconciler.run())
        polling = asyncio.create_task(self._poll())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({reconciling, stopping, polling}, return_when=asyncio.FIRST_COMPLETED)
            is_asked_to_stop = not reconciling.done() and not polling.done()
            # From here on an engine that ends was drained and must not count as failed.
            await _cancel(reconciling)
            if is_asked_to_stop:
                await self._drain()
        finally:
            await _cancel(reconciling)
            await _cancel(stopping)
            await _cancel(polling)
            await self._end()
        for task in (reconciling, polling):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def kill_now(self) -> None:
        self.node.kill_now()
        self._gateway.kill_now()
        self.watcher.kill_now()

    async def _end(self) -> None:
        self._draining = True
        self._publish()
        # The watcher stops first; otherwise it would record that everything is down.
        await asyncio.gather(self.watcher.stop(), self._gateway.stop(_GATEWAY_GRACE_SECONDS), self.node.close())
        self.options.endpoints_path.unlink(missing_ok=True)

    async def _drain(self) -> None:
        """Stop admission; running requests may finish within the model's drain time."""
        self._draining = True
        self._publish()
        addresses = [endpoint.removeprefix("http://") for endpoint in self._engine_urls()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.model.spec.timeouts.drain_seconds):
                await asyncio.gather(
                    *(_drain_engine(address, authorization([self._engine_key])) for address in addresses)
                )

    def _engine_urls(self) -> list[str]:
        endpoints = group_endpoints(self.model, self.status, self.node.pods(), draining=False)
        return [group.url for group in endpoints.groups if group.ready]

    def _pods_changed(self) -> None:
        self._reconciler.wake()
        self._publish()

    def _take_event(self, event: PlannedEvent) -> None:
        self._recorder.add_event(event)
        self._publish()
        self._on_event(event)

    def _status_changed(self, status: PipelineModelStatus) -> None:
        self.watcher.set_status(status, self.node.pods())
        self._publish()

    def _publish(self) -> None:
        pods = self.node.pods()
        write_endpoints(self.options.endpoints_path, group_endpoints(self.model, self.status, pods, self._draining))
        self._recorder.write(self.status, pods, self._store.of_kind("ConfigMap"))
        self.watcher.set_pods(pods)
        self._on_change()

    async def _poll(self) -> None:
        while True:
            self.readings = await poll(self.node.pods())
            for name, stage in self.readings.stages.items():
                if stage.layers is not None:
                    self._reconciler.learn_layers(name, f"{stage.layers.first}-{stage.layers.last}")
            self._on_change()
            await asyncio.sleep(_POLL_SECONDS)

    def _gateway_command(self, admin_port: int | None) -> ContainerCommand:
        options = self.options
        address = ["--host", options.host, "--port", str(options.port)]
        address += [] if admin_port is None else ["--admin-port", str(admin_port)]
        manners = ("--endpoints", str(options.endpoints_path), "--drain-seconds", f"{_GATEWAY_DRAIN_SECONDS:g}")
        return ContainerCommand(
            argv=(*options.gateway_argv, *address, *manners),
            env={**options.images.env, env.ENGINE_KEYS: self._engine_key},
            working_dir=options.state_dir,
            log_file=options.state_dir / "logs" / "gateway.log",
            termination_file=options.state_dir / "gateway-termination",
        )


def _port_for_metrics(options: SessionOptions) -> int:
    """The gateway's admin port, which Prometheus must know: the one after the gateway's, or a free one."""
    beside = options.port % 65535 + 1
    if can_bind(options.host, beside):
        return beside
    with socket.create_server((options.host, 0)) as listener:
        return int(listener.getsockname()[1])


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _drain_engine(address: str, shown: str) -> None:
    """Ask an engine to drain and wait until it is idle or no longer responds."""
    headers = {"authorization": shown}
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=5.0, headers=headers) as client:
        with contextlib.suppress(httpx.HTTPError):
            await client.post(f"http://{address}/v1/drain")
            while True:
                status = (await client.get(f"http://{address}/status")).json()
                if not status.get("requests_running") and not status.get("requests_waiting"):
                    return
                await asyncio.sleep(0.1)
