"""Stages of several ranks on the real control plane: what is made for them, and how the rank that failed is told."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, InstantKubelet, instant_kubelet
from cluster.model_in_cluster import READY_SECONDS, ModelInCluster, small_model
from cluster.operator_process import OperatorProcess
from cluster.operator_under_test import create_model, operator_replica, wait_ready
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, to_json
from processes.gateway_process import running_gateway
from processes.serving_command import kill
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_api.runtime_config import RuntimeConfig

SOON_SECONDS = 180.0
GPU = "nvidia.com/gpu"


@pytest.fixture
def kubelets(cluster: Cluster) -> Iterator[list[InstantKubelet]]:
    """Two nodes with two devices each."""
    with cluster.connect() as client, ExitStack() as stack:
        yield [stack.enter_context(instant_kubelet(client, **{GPU: "2"})) for _ in range(2)]


def pods_of(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in cluster.api.list("Pod", namespace)}


def stage_container(pod: dict[str, Any]) -> dict[str, Any]:
    return next(dict(each) for each in pod["spec"]["containers"] if each["name"] == "stage")


ON_DEVICES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "vllm": ({"name": "vllm"}, "tensor", {"limits": {GPU: "2"}}),
    "ranks of layers": ({"device": "cuda"}, "tensor", {}),
    "ranks of experts": ({"device": "cuda"}, "expert", {"limits": {GPU: "2"}}),
}


@pytest.mark.parametrize(("engine", "field", "resources"), ON_DEVICES.values(), ids=ON_DEVICES.keys())
def test_pods_of_two_devices_each_are_placed_and_ready(
    engine: dict[str, Any],
    field: str,
    resources: dict[str, Any],
    cluster: Cluster,
    namespace: str,
    kubelets: list[InstantKubelet],
    tmp_path: Path,
) -> None:
    """The scheduler counts each rank's device, named or not: a node of two has room for one stage of two."""
    template = {"tolerations": [TOLERATION], "resources": resources}
    spec = {"engine": engine | {"maxModelLen": 64}, "parallelism": {"pipeline": 2, field: 2}}
    with operator_replica(
        cluster.kubeconfig, tmp_path / "log", "--namespace", namespace, "--no-leader-elect"
    ) as operator:
        create_model(cluster.api, namespace, "tiny", template, **spec)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        pods = pods_of(cluster, namespace)
        assert [stage_container(pods[name])["resources"]["limits"][GPU] for name in sorted(pods)] == ["2", "2"]
        assert {pod["spec"]["nodeName"] for pod in pods.values()} == {each.name for each in kubelets}


@pytest.mark.parametrize("field", ["tensor", "expert"])
def test_a_stage_of_ranks_is_one_pod_and_the_rank_that_failed_is_on_record(
    field: str, cluster: Cluster, namespace: str, kubelets: list[InstantKubelet], tmp_path: Path
) -> None:
    template = {"tolerations": [TOLERATION], "resources": {"limits": {"cpu": "3"}, "requests": {"cpu": "3"}}}
    spec = {"parallelism": {"pipeline": 2, field: 3}, "stages": [each.selection for each in kubelets]}
    with operator_replica(
        cluster.kubeconfig, tmp_path / "log", "--namespace", namespace, "--no-leader-elect"
    ) as operator:
        create_model(cluster.api, namespace, "tiny", template, **spec)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        pods = pods_of(cluster, namespace)
        assert sorted(pods) == ["tiny-0-1-0", "tiny-0-1-1"]
        (volume,) = [each for each in pods["tiny-0-1-1"]["spec"]["volumes"] if each["name"] == "config"]
        config_map = cluster.api.get("ConfigMap", volume["configMap"]["name"], namespace)
        assert config_map is not None
        config = RuntimeConfig.model_validate_json(config_map["data"]["config.json"])
        assert (getattr(config, field), config.stage_ranks) == (3, 3)
        told = TerminationMessage(failure_class=FailureClass.OUT_OF_MEMORY, stage=1, rank=2, detail="no room for it")
        kubelets[1].end_container(pods["tiny-0-1-1"], 66, told.model_dump_json())

        def failures() -> list[dict[str, Any]]:
            model = cluster.api.get("PipelineModel", "tiny", namespace) or {}
            return list(model.get("status", {}).get("lastFailures", []))

        wait_until("the failure is on record", failures, SOON_SECONDS, operator.log)
        (failure,) = failures()
        assert (failure["stage"], failure["rank"], failure["message"]) == (1, 2, "no room for it"), to_json(failure)
        events = ("events", "-n", namespace, "--for", "plm/tiny")
        sentence = "stage 1, rank 2 of group 0 failed: OutOfMemory: no room for it"
        wait_until("the event says so", lambda: sentence in cluster.kubectl_ok(*events), SOON_SECONDS, operator.log)
        wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, operator.log)
        assert sorted(pods_of(cluster, namespace)) == ["tiny-0-2-0", "tiny-0-2-1"]


def ranks_of(model: ModelInCluster, stage: int) -> list[int]:
    """Process ids of a stage's ranks, in their order: the supervisor starts one after another."""
    supervisor = model.container_pid(stage, "stage")
    return sorted(int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())


def test_ranks_answer_and_a_killed_one_is_named_and_its_group_comes_back(
    cluster: Cluster,
    nodes: SimulatedNodes,
    operator: OperatorProcess,
    namespace: str,
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    """Two stages of two real ranks each, in pods of two devices, though they compute on CPUs: no answer is lost."""
    assert operator.pid
    model = small_model(cluster, namespace, tiny_llama_dir, nodes)
    model.apply(
        parallelism={"pipeline": 2, "tensor": 2},
        template={"resources": {"limits": {GPU: "2"}}},
        restart={"backoffSeconds": 1},
        timeouts={"resumeWindowSeconds": round(READY_SECONDS)},  # as long as a busy machine may need
    )
    model.until_ready()
    assert [stage_container(pod)["resources"]["limits"] for pod in model.pods()] == [{GPU: "2"}] * 2
    before = model.incarnation()
    with running_gateway(cluster, namespace, tmp_path) as gateway:
        wait_until("the gateway serves", gateway.serves, SOON_SECONDS, gateway.log_end)
        with steady_traffic(gateway.url, model.name) as traffic:
            wait_until("answers come", lambda: traffic.answers >= 3, SOON_SECONDS, lambda: traffic.failures)
            ranks = ranks_of(model, 1)
            assert len(ranks) == 2, ranks
            kill(ranks[1])
            model.until_incarnation(before)
            asked = traffic.answers
            wait_until("it answers anew", lambda: traffic.answers >= asked + 3, SOON_SECONDS, lambda: traffic.failures)
        assert traffic.failures == []
        assert len(traffic.texts) == 1, traffic.texts
    (failure,) = model.status()["lastFailures"]
    assert (failure["stage"], failure["rank"], failure["failureClass"]) == (1, 1, "Killed"), to_json(failure)
