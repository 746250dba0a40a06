"""A model that can't start is told apart by its cause, in the status and in words a person can act on."""

import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import instant_kubelet
from cluster.model_in_cluster import ModelInCluster, condition_in, small_model
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, column_of

SOON_SECONDS = 180.0
TOO_MANY = {"limits": {"nvidia.com/gpu": "9"}, "requests": {"nvidia.com/gpu": "9"}}


@pytest.fixture
def model(
    cluster: Cluster, nodes: SimulatedNodes, operator: OperatorProcess, namespace: str, tiny_llama_dir: Path
) -> ModelInCluster:
    assert operator.pid
    return small_model(cluster, namespace, tiny_llama_dir, nodes)


def stage_messages(status: dict[str, Any]) -> list[str]:
    """What every stage of group 0 says."""
    return [stage.get("message", "") for group in status.get("groups", [])[:1] for stage in group["stages"]]


def reason_of(model: ModelInCluster, kind: str = "Ready") -> str:
    return str(model.condition(kind).get("reason"))


def test_a_stage_that_finds_no_node_shows_the_schedulers_words(model: ModelInCluster) -> None:
    model.apply(template={"resources": TOO_MANY})
    status = model.until(
        "the scheduler's words are on the status",
        lambda status: any("Insufficient nvidia.com/gpu" in words for words in stage_messages(status)),
        SOON_SECONDS,
    )
    assert status["readyReplicas"] == 0
    model.until("the condition says so", lambda _: reason_of(model) == "Unschedulable", SOON_SECONDS)
    table = model.cluster.kubectl_ok("get", "plm", model.name, "-n", model.namespace)
    assert column_of(table, "REASON") == "Unschedulable", table


def test_a_group_that_found_half_its_nodes_gives_them_back(model: ModelInCluster, nodes: SimulatedNodes) -> None:
    """Stage 1 can't be placed; stage 0 must not hold its devices for ever, nor burn the restart budget."""
    stages = [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}, {"resources": TOO_MANY}]
    model.apply(stages=stages, timeouts={"schedulingSeconds": 5}, restart={"maxRestarts": 0})

    def _given_back(_: dict[str, Any]) -> bool:
        events = model.cluster.kubectl_ok("events", "-n", model.namespace, "--for", f"plm/{model.name}")
        return "GroupUnschedulable" in events

    model.until("it gave its nodes back", _given_back, SOON_SECONDS)
    assert reason_of(model, "Degraded") != "RestartBudgetSpent", model.everything()
    # What it gave back is free for others: a pod that needs a whole node is bound.
    assert len(nodes.by_name) == 3
    model.apply(stages=[{}, {}])
    model.until_ready()


def test_an_image_that_cannot_be_pulled_is_named_and_the_next_apply_mends_it(model: ModelInCluster) -> None:
    model.apply(template={"image": "example.org/none:1"}, restart={"maxRestarts": 0})
    model.until("the condition says so", lambda _: reason_of(model) == "ImagePull", SOON_SECONDS)
    assert "example.org/none:1" in model.condition("Ready")["message"]
    model.apply(template={})
    model.until_ready()


def test_a_directory_that_no_node_has_is_named(model: ModelInCluster) -> None:
    """Process nodes say so in the pod's status, as kubelets do of a Secret that is missing."""
    model.apply(model={"source": "file:///nowhere/tiny"})
    model.until("the condition says so", lambda _: reason_of(model) == "NotStarted", SOON_SECONDS)
    assert "/nowhere/tiny" in model.condition("Ready")["message"]


def test_a_volume_that_will_not_mount_is_the_stages_reason(
    cluster: Cluster, operator: OperatorProcess, namespace: str, tiny_llama_dir: Path
) -> None:
    """Kubelets say it in Events alone. The operator reads them with the chart's rights."""
    assert operator.pid
    model = small_model(cluster, namespace, tiny_llama_dir, None)
    words = 'MountVolume.SetUp failed for volume "data" : mount failed: exit status 32'
    with cluster.connect() as client, instant_kubelet(client) as kubelet:
        kubelet.holds = True
        model.apply(template=kubelet.template)
        wait_until("a pod has its node", lambda: any(p["spec"].get("nodeName") for p in model.pods()), SOON_SECONDS)
        pod = next(pod for pod in model.pods() if pod["spec"].get("nodeName"))
        say(cluster, namespace, pod, "FailedMount", words)
        model.until("the condition says so", lambda _: reason_of(model) == "NotStarted", SOON_SECONDS)
        assert words in model.condition("Ready")["message"]
        kubelet.holds = False
        model.until_ready()


def say(cluster: Cluster, namespace: str, pod: dict[str, Any], reason: str, message: str) -> None:
    """A Warning about a pod, as a kubelet makes it."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace}
    warning = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod['metadata']['name']}.1", "namespace": namespace},
        "involvedObject": about | {name: pod["metadata"][name] for name in ("name", "uid")},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "kubelet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    response = cluster.api.create("Event", warning, namespace)
    assert response.status_code == 201, response.text


def test_a_stage_over_its_memory_limit_is_named_and_more_memory_mends_it(model: ModelInCluster) -> None:
    """Torch alone takes more than the limit. Stage 0, which waits for its peer meanwhile, is not blamed."""
    stages = [{}, {"resources": {"limits": {"memory": "32Mi"}}}]
    model.apply(stages=stages, restart={"maxRestarts": 1})
    status = model.until(
        "its restart is used up",
        lambda status: condition_in(status, "Degraded").get("reason") == "RestartBudgetSpent",
    )
    failures = [(f["failureClass"], f["stage"], f["exitCode"], f["incarnation"]) for f in status["lastFailures"]]
    assert failures == [("OOMKilled", 1, 137, 2), ("OOMKilled", 1, 137, 1)], status
    assert "OOMKilled" in model.condition("Ready")["message"]
    model.apply(stages=[{}, {}])
    model.until_ready()


def test_a_configuration_that_cannot_work_is_never_tried_again(
    model: ModelInCluster, operator: OperatorProcess
) -> None:
    """The cut does not fit the model's four layers, which only the engine can know."""
    model.apply(stages=[{"layers": "0-4"}, {"layers": "5-9"}])
    model.cluster.kubectl_ok(
        "wait", "--for=condition=Degraded", f"plm/{model.name}", "-n", model.namespace, f"--timeout={SOON_SECONDS:g}s"
    )
    assert reason_of(model, "Degraded") == "BadConfiguration"
    (failure,) = model.status()["lastFailures"]
    assert (failure["exitCode"], failure["failureClass"]) == (64, "BadConfig")
    assert "layers" in failure["message"], failure
    # Not even by an operator that knows nothing yet.
    operator.end(signal.SIGKILL)
    operator.start()
    model.cluster.kubectl_ok("annotate", "plm", model.name, "-n", model.namespace, "looked=again")
    wait_until("it was looked at again", lambda: operator.passes() >= 1, SOON_SECONDS, operator.log_end)
    assert model.incarnation() == 1
    model.apply(stages=[{"layers": "0-0"}, {"layers": "1-3"}])
    status = model.until_ready()
    assert [stage["layers"] for stage in status["groups"][0]["stages"]] == ["0-0", "1-3"]
