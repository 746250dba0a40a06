"""Groups by load: by the operator itself, and by the example's HorizontalPodAutoscaler under the real controller."""

import json
from pathlib import Path
from typing import Any

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.external_metrics_api import external_metrics
from cluster.instant_kubelet import InstantKubelet
from cluster.model_in_cluster import small_model
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster
from oracles.tiny_models import EOS_TOKEN_ID
from processes.gateway_process import running_gateway
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


def test_the_operator_adds_groups_by_the_queues_of_their_engines_and_takes_them_away(
    cluster: Cluster,
    nodes: SimulatedNodes,
    operator: OperatorProcess,
    namespace: str,
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    """Real engines that run one request at a time: eight clients wait for each other, and a second group is made."""
    assert operator.pid
    rules = {"maxReplicas": 2, "queueSeconds": 1, "scaleInSeconds": 5}
    engine = {"dtype": "float32", "maxNumSeqs": 1, "maxModelLen": 512}
    model = small_model(cluster, namespace, tiny_llama_dir, nodes, engine=engine, autoscaling=rules)
    model.apply()
    model.until_ready(groups=1)
    first = model.pod_uids()
    endless: dict[str, Any] = {"logit_bias": {str(EOS_TOKEN_ID): -100}}
    with running_gateway(cluster, namespace, tmp_path) as gateway:
        wait_until("the gateway serves", gateway.serves, SOON_SECONDS, gateway.log_end)
        with steady_traffic(gateway.url, model.name, clients=8, max_tokens=450, **endless) as traffic:
            model.until_ready(groups=2)
            wait_until("clients are answered", lambda: traffic.answers >= 8, SOON_SECONDS, lambda: traffic.failures)
    assert traffic.failures == []
    model.until_ready(groups=1)
    wait_until("the second group is gone", lambda: model.pod_uids() == first, SOON_SECONDS, model.everything)
    assert model.get()["spec"]["replicas"] == 1
    events = json.loads(cluster.kubectl_ok("get", "events", "-n", namespace, "-o", "json"))
    said = "\n".join(each["message"] for each in events["items"])
    assert "replicas 1 -> 2: a request has waited for " in said, said
    assert "replicas 2 -> 1: that was enough for 5 s" in said, said
