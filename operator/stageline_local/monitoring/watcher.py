"""What a session tells whoever watches it, and the watcher of a session that nobody watches."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.status import PipelineModelStatus
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.node.pod_status import Terminated


class Watcher(Protocol):
    """Begins before the first pod and ends after the last."""

    async def start(self) -> None:
        """Begin; raises `UserError` when that can't be."""

    def set_pods(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """These pods are there now."""

    def set_status(self, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]]) -> None:
        """The model's status is another one now."""

    def pass_done(self, seconds: float) -> None:
        """The reconciler looked once."""

    async def is_ready(self) -> bool:
        """Whether a person could look."""

    async def stop(self) -> None:
        """End, gracefully."""

    def kill_now(self) -> None:
        """End at once."""


class Nobody:
    """Hears everything and does nothing."""

    async def start(self) -> None:
        """Nothing to begin."""

    def set_pods(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Nobody scrapes them."""

    def set_status(self, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]]) -> None:
        """Nobody counts."""

    def pass_done(self, seconds: float) -> None:
        """Nobody counts."""

    async def is_ready(self) -> bool:
        """Nothing to wait for."""
        return True

    async def stop(self) -> None:
        """Nothing to end."""

    def kill_now(self) -> None:
        """Nothing to end."""


def watcher_of(
    model: PipelineModel,
    options: MonitorOptions | None,
    state_dir: Path,
    gateway_admin_port: int | None,
    on_end: Callable[[Terminated], None],
) -> Watcher:
    """Prometheus and boards as `options` say, or nobody. Raises `UserError` when what that needs is not installed."""
    if options is None:
        return Nobody()
    # Only who is watched needs a web server and the operator's metrics.
    from stageline_local.monitoring.monitor import Monitor

    return Monitor(model, options, state_dir, f"127.0.0.1:{gateway_admin_port}", on_end)
