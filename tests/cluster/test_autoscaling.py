"""The HorizontalPodAutoscaler of the examples, unchanged, under the real controller and the real aggregator."""

import json
from pathlib import Path
from typing import Any

from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.external_metrics_api import external_metrics
from cluster.instant_kubelet import InstantKubelet
from cluster.model_in_cluster import small_model
from cluster.operator_process import OperatorProcess
from cluster.under_test import Cluster
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_runtime import metric_names

SOON_SECONDS = 180.0


def test_the_shipped_autoscaler_adds_groups_by_the_queue_of_their_engines(
    cluster: Cluster,
    control_plane: ControlPlane,
    operator: OperatorProcess,
    kubelet: InstantKubelet,
    namespace: str,
    repository: Path,
) -> None:
    """30 requests wait, 8 for each group are meant to. What scales down waits for the ten minutes of the example."""
    assert operator.pid
    page = MetricRegistry()
    waiting = page.gauge(metric_names.NUM_REQUESTS_WAITING)
    waiting.labels("another").set(1000)
    waiting.labels("smollm2").set(0)
    model = small_model(cluster, namespace, Path("/models/tiny"), None, "smollm2", template=kubelet.template)
    model.apply()
    model.until_ready()
    pods = model.pod_uids()

    def scaler() -> dict[str, Any]:
        found = cluster.kubectl_ok("get", "hpa", "smollm2", "-n", namespace, "-o", "json")
        return dict(json.loads(found).get("status", {}))

    def condition(kind: str) -> str:
        return next((each["reason"] for each in scaler().get("conditions", []) if each["type"] == kind), "")

    with external_metrics(cluster, control_plane, lambda: page.exposition("")[0].decode()) as metrics:
        cluster.kubectl_ok("apply", "-n", namespace, "-f", str(repository / "examples" / "autoscaling" / "hpa.yaml"))
        wait_until(
            "it has read the metric", lambda: condition("ScalingActive") == "ValidMetricFound", SOON_SECONDS, scaler
        )
        assert "labelSelector=model_name%3Dsmollm2" in metrics.asked[-1]
        assert model.get()["spec"]["replicas"] == 1
        waiting.labels("smollm2").set(30)
        status = model.until("there are four groups", lambda status: status.get("readyReplicas") == 4, SOON_SECONDS)
        assert status["replicas"] == model.get()["spec"]["replicas"] == 4
        assert pods < model.pod_uids(), "the group that was there stays"
        waiting.labels("smollm2").set(0)
        wait_until("it waits", lambda: condition("AbleToScale") == "ScaleDownStabilized", SOON_SECONDS, scaler)
        assert model.get()["spec"]["replicas"] == 4
