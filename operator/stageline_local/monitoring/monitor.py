"""Prometheus, the page and the operator's series of one session, started and ended together.

The session tells of pods, statuses and passes; everything else happens here. A Prometheus that dies is reported and
started again; the page says so too while it is gone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.status import PipelineModelStatus
from stageline_local.monitoring.board_server import BoardServer
from stageline_local.monitoring.operator_series import OperatorSeries
from stageline_local.monitoring.options import MonitorOptions, find_plotly, find_prometheus
from stageline_local.monitoring.prometheus import PrometheusServer
from stageline_local.monitoring.scrape import pod_targets, prometheus_config
from stageline_local.node.pod_status import Terminated

SCRAPE_INTERVAL_SECONDS: Final = 2
"""One machine's handful of targets can be asked often: what happens shows within seconds."""


class Monitor:
    """Watches one model. Raises `UserError` when made without Prometheus or plotly installed."""

    def __init__(
        self,
        model: PipelineModel,
        options: MonitorOptions,
        state_dir: Path,
        gateway_admin: str,
        on_end: Callable[[Terminated], None],
    ) -> None:
        """`gateway_admin` is host:port of the gateway's metrics; `on_end` hears of a Prometheus that ended."""
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
        """Listen and run; Prometheus answers a moment later. Raises `UserError` when the page's port is taken."""
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
        """Scrape these pods from now on."""
        self.prometheus.set_targets(pod_targets(pods))

    def set_status(self, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]]) -> None:
        """Count what happened to groups."""
        self.operator.status_changed(status, pods)

    def pass_done(self, seconds: float) -> None:
        """Count a pass of the reconciler."""
        self.operator.pass_done(seconds)

    async def is_ready(self) -> bool:
        """Whether Prometheus answers; the page does from the start."""
        return await self.prometheus.is_ready()

    async def stop(self) -> None:
        """End both; nothing of them is left but what Prometheus keeps."""
        await self.prometheus.stop()
        await self._page.close()

    def kill_now(self) -> None:
        """SIGKILL Prometheus at once; the page ends with this process."""
        self.prometheus.kill_now()
