"""The hooks by which a session reports its changes to a `Monitor`, or to a `Watcher` that ignores them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.monitoring.options import MonitorOptions
from stageline_local.node.pod_status import Terminated


class Watcher:
    """Ignores all reports of a session; `Monitor` overrides every method.

    A session calls these whether it is monitored or not, so that it needs no special case.
    """

    async def start(self) -> None:
        """Called before the first pod; raises `UserError` if monitoring is not possible."""

    def set_pods(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Receive all current pods."""

    def set_status(self, status: PipelineModelStatus, pods: Sequence[Mapping[str, Any]]) -> None:
        """Receive the model's new status."""

    def pass_done(self, seconds: float) -> None:
        """A reconcile finished after `seconds`."""

    async def is_ready(self) -> bool:
        """Whether the boards can be viewed; the session is ready only then."""
        return True

    async def stop(self) -> None:
        """Called at a clean end, before the last pods end."""

    def kill_now(self) -> None:
        """Called if the user does not wait for a clean end."""


def watcher_of(
    model: PipelineModel,
    options: MonitorOptions | None,
    state_dir: Path,
    gateway_admin_port: int | None,
    on_end: Callable[[Terminated], None],
) -> Watcher:
    """A `Monitor` if there are options for one, else hooks without effect. Raises `UserError` like `Monitor`."""
    if options is None:
        return Watcher()
    # Imported here because only a monitored session needs a web server and the operator's metrics.
    from stageline_local.monitoring.monitor import Monitor

    return Monitor(model, options, state_dir, f"127.0.0.1:{gateway_admin_port}", on_end)
