"""Monitoring of one session: Prometheus, the boards page, and the metrics that the operator exports in a cluster.

All three start and end together. If Prometheus dies it is reported and restarted; the page shows that it is down. The
operator's metrics come from the operator's own code, fed by the local reconciler: gauges of the model and its groups,
failures, restarts, times to ready and to recover, and reconciles. Metrics that only a cluster has (watches, API server
requests) have no samples. The local reconciler always leads, and its only model never waits for a worker. No reconcile
runs during a scrape, because both run in one event loop.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from stageline_api.resource import pipeline_model
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.monitoring.board_server import BoardServer
from stageline_local.monitoring.options import MonitorOptions, find_plotly, find_prometheus
from stageline_local.monitoring.prometheus import PrometheusServer
from stageline_local.monitoring.scrape import pod_targets, prometheus_config
from stageline_local.monitoring.watcher import Watcher
from stageline_local.node.pod_status import Terminated
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.model_gauges import Reading
from stageline_operator.controller.telemetry.transitions import transition_between
from stageline_operator.controller.view.object_cache import ObjectCache


class OperatorSeries:
    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._status = PipelineModelStatus()
        self._versions = 0
        self._cache = ObjectCache()
        self._metrics = OperatorMetrics()
        self._metrics.expose(self._cache, _readings)
        self._keep()

    def status_changed(self, status: PipelineModelStatus, pods: Iterable[Mapping[str, Any]]) -> None:
        """Count the changes in a new status."""
        dated = [_with_creation(pod) for pod in pods]
        transition = transition_between(self._status, status, dated, datetime.now(UTC))
        self._metrics.count_transition(self._model.namespace, self._model.name, transition)
        self._status = status
        self._keep()

    def pass_done(self, seconds: float) -> None:
        self._metrics.reconciles.labels("done").inc()
        self._metrics.reconcile_seconds.observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics and their content type, in the format that `accept` names."""
        return self._metrics.registry.exposition(accept)

    def _keep(self) -> None:
        """Store the model as an API server would: with a new version each time."""
        self._versions += 1
        manifest = self._model.to_manifest()
        manifest["metadata"] = {"namespace": self._model.namespace, "name": self._model.name} | manifest["metadata"]
        manifest["metadata"]["resourceVersion"] = str(self._versions)
        self._cache.put(pipeline_model.KIND, manifest | {"status": self._status.to_manifest()})


def _readings() -> Iterator[Reading]:
    yield names.LEADER, (), 1.0
    yield names.QUEUE_DEPTH, (), 0.0
    yield names.LONGEST_PASS, (), 0.0


def _with_creation(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Local pods are created when they are started."""
    return {**pod, "metadata": {"creationTimestamp": pod["status"]["startTime"], **pod["metadata"]}}


SCRAPE_INTERVAL_SECONDS: Final = 2
"""One machine has few targets, so a short interval is cheap: changes show within seconds."""


class Monitor(Watcher):
    """Watches one model. Creating it raises `UserError` if Prometheus or plotly is not installed."""

    def __init__(
        self,
        model: PipelineModel,
        options: MonitorOptions,
        state_dir: Path,
        gateway_admin: str,
        on_end: Callable[[Terminated], None],
    ) -> None:
        """`gateway_admin` is host:port of the gateway's metrics; `on_end` is called when Prometheus ends."""
        self._options = options
        self._namespace = model.namespace
        self._gateway_admin = gateway_admin
        self.operator = OperatorSeries(model)
        self.prometheus = PrometheusServer(
            find_prometheus(),
            state_dir / "prometheus",
            state_dir / "logs" / "prometheus.log",
            options.prometheus_port,
            on_end,
        )
        facts = {
            "model": model.name,
            "scrape_interval_seconds": SCRAPE_INTERVAL_SECONDS,
            "alert_speed": options.alert_speed,
            "prometheus": options.prometheus_url,
        }
        self._page = BoardServer(options.boards, find_plotly(), options.prometheus_url, facts, self.operator.exposition)

    async def start(self) -> None:
        """Listen and run; Prometheus responds a moment later. Raises `UserError` if the page's port is in use."""
        await self._page.start(self._options.port)
        self.set_pods(())
        rules = self.prometheus.write_rules(self._options.rules, self._options.alert_speed)
        operator_address = f"127.0.0.1:{self._options.port}"
        self.prometheus.start(
            prometheus_config(
                self.prometheus.targets_dir,
                rules,
                self._namespace,
                self._gateway_admin,
                operator_address,
                SCRAPE_INTERVAL_SECONDS,
            )
        )

    def set_pods(self, pods: Sequence[Mapping[str, Any]]) -> None:
        self.prometheus.set_targets(pod_targets(pods))

    def set_status(self, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]]) -> None:
        self.operator.status_changed(status, pods)

    def pass_done(self, seconds: float) -> None:
        self.operator.pass_done(seconds)

    async def is_ready(self) -> bool:
        return await self.prometheus.is_ready()

    async def stop(self) -> None:
        """End both; only Prometheus' data remains."""
        await self.prometheus.stop()
        await self._page.close()

    def kill_now(self) -> None:
        """SIGKILL Prometheus at once; the page ends with this process."""
        self.prometheus.kill_now()
