"""What the operator exports in a cluster, from the reconciler that stands for it here, by the operator's own code.

The model's and its groups' gauges, failures, restarts, times to ready and to recover, and the passes themselves. What
only a cluster has (watches, requests to an API server) has no samples here. This reconciler leads, since there is no
other; its one model never waits for a worker; and a pass is never under way when somebody asks, both being turns of one
event loop.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from stageline_api.resource import pipeline_model
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.status import PipelineModelStatus
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.model_gauges import Reading
from stageline_operator.controller.telemetry.transitions import transition_between
from stageline_operator.controller.view.object_cache import ObjectCache


class OperatorSeries:
    """The series of one model's reconciler."""

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._status = PipelineModelStatus()
        self._versions = 0
        self._cache = ObjectCache()
        self._metrics = OperatorMetrics()
        self._metrics.expose(self._cache, _readings)
        self._keep()

    def status_changed(self, status: PipelineModelStatus, pods: Iterable[Mapping[str, Any]]) -> None:
        """Count what a new status says for the first time."""
        dated = [_with_creation(pod) for pod in pods]
        transition = transition_between(self._status, status, dated, datetime.now(UTC))
        self._metrics.count_transition(self._model.namespace, self._model.name, transition)
        self._status = status
        self._keep()

    def pass_done(self, seconds: float) -> None:
        """One pass of the reconciler ended."""
        self._metrics.reconciles.labels("done").inc()
        self._metrics.reconcile_seconds.observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Everything, and its content type, in the form that `accept` names."""
        return self._metrics.registry.exposition(accept)

    def _keep(self) -> None:
        """The model as an API server would hold it: a later version each time."""
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
    """Pods here are made at the moment they are started."""
    return {**pod, "metadata": {"creationTimestamp": pod["status"]["startTime"], **pod["metadata"]}}
