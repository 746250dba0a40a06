"""A ready model says which stages use CPUs without being asked to, and that a download ends with its pod."""

from typing import Any

import pytest

from cluster.planned_cluster import PlannedCluster, tiny_model
from stageline_api.conditions import ConditionType
from stageline_operator.planner.status.advice import give_advice

GPU: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
CLAIM: dict[str, Any] = {
    "podTemplate": {"spec": {"containers": [{"name": "stage", "resources": {"claims": [{"name": "gpu"}]}}]}}
}
HUB: dict[str, Any] = {"source": "hf://org/name"}
ON_CPUS = "no GPU is requested for {}, so CPUs are used: set spec.engine.device to cuda, or to cpu if that is meant"
DOWNLOADS = "every new pod downloads the model again: set spec.model.cache to keep it"


def ready_message(**spec: Any) -> str:
    cluster = PlannedCluster(tiny_model(**spec))
    cluster.settle()
    cluster.make_ready()
    cluster.settle()
    (ready,) = [each for each in cluster.status.conditions if each.type == ConditionType.READY]
    assert ready.status == "True"
    return ready.message


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        pytest.param({}, [ON_CPUS.format("any stage")], id="auto"),
        pytest.param({"stages": [GPU, {}]}, [ON_CPUS.format("stages 1")], id="auto-and-one-gpu"),
        pytest.param({"template": GPU}, [], id="auto-on-gpus"),
        pytest.param({"template": CLAIM}, [], id="auto-with-a-claim"),
        pytest.param({"engine": {"device": "cpu"}}, [], id="cpu"),
        pytest.param({"engine": {"device": "cuda"}}, [], id="cuda"),
        pytest.param({"engine": {"name": "vllm"}}, [], id="vllm"),
        pytest.param({"model": HUB}, [ON_CPUS.format("any stage"), DOWNLOADS], id="download"),
        pytest.param({"engine": {"device": "cpu"}, "model": HUB}, [DOWNLOADS], id="download-on-cpus"),
        pytest.param(
            {"engine": {"device": "cpu"}, "model": HUB | {"cache": {"hostPath": "/models"}}}, [], id="kept-on-the-node"
        ),
        pytest.param(
            {"engine": {"device": "cpu"}, "model": HUB | {"cache": {"claimTemplate": {"size": "1Gi"}}}},
            [],
            id="kept-on-claims",
        ),
        pytest.param(
            {"engine": {"device": "cpu"}, "model": HUB | {"cache": {"sizeLimit": "1Gi"}}},
            [DOWNLOADS],
            id="only-a-limit",
        ),
    ],
)
def test_a_ready_model_says_what_its_spec_leaves_open(spec: dict[str, Any], advice: list[str]) -> None:
    assert ready_message(**spec) == "; ".join(["1 of 1 groups are ready", *advice])


def test_on_one_machine_stages_see_its_gpus_without_a_request() -> None:
    assert give_advice(tiny_model(), gpu_resource="") == ""
