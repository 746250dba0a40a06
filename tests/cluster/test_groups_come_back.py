"""Whatever dies, the group comes back under a new incarnation, and the cluster is told what died first.

The tests share one model of two stages on three nodes; each starts from a ready group.
"""

import signal
from typing import Any

import pytest

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.api_server_outage import api_server_outage
from cluster.control_plane import ControlPlane
from cluster.model_in_cluster import READY_SECONDS, ModelInCluster
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from processes.gateway_process import GatewayProcess
from processes.serving_command import alive, kill


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    """A short window, so that one test's restarts don't lengthen the back-off of the next.

    Answers wait for the next incarnation for as long as a busy machine may need to start it.
    """
    return {
        "restart": {"backoffSeconds": 1, "windowSeconds": 5},
        "timeouts": {"resumeWindowSeconds": round(READY_SECONDS)},
    }


def failure_of(model: ModelInCluster, incarnation: int) -> dict[str, Any]:
    """What the status says of the end of one incarnation."""
    found = [each for each in model.status()["lastFailures"] if each["incarnation"] == incarnation]
    assert len(found) == 1, model.everything()
    return dict(found[0])


@pytest.mark.parametrize(("stage", "container"), [(0, "stage"), (1, "stage"), (0, "engine")])
def test_a_killed_container_takes_its_group_along_and_is_named(
    model: ModelInCluster, stage: int, container: str
) -> None:
    before = model.incarnation()
    kill(model.container_pid(stage, container))
    model.until_incarnation(before)
    failure = failure_of(model, before)
    assert (failure["stage"], failure["container"], failure["failureClass"]) == (stage, container, "Killed"), failure
    assert "SIGKILL" in failure["message"]
    assert failure["exitCode"] == 137
    events = ("events", "-n", model.namespace, "--for", f"plm/{model.name}")
    wait_until("an Event tells it", lambda: "GroupFailed" in model.cluster.kubectl_ok(*events), 150, model.everything)


def test_no_answer_is_lost_with_the_only_group(model: ModelInCluster, shared_gateway: GatewayProcess) -> None:
    """Answers that had begun go on where they were on the next incarnation; new ones wait for it."""
    wait_until("the gateway serves", shared_gateway.serves, 150, shared_gateway.log_end)
    before = model.incarnation()
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        wait_until("answers come", lambda: traffic.answers >= 3, 150, lambda: traffic.failures)
        kill(model.container_pid(1, "stage"))
        model.until_incarnation(before)
        asked = traffic.answers
        wait_until("the new group answers", lambda: traffic.answers >= asked + 10, 150, lambda: traffic.failures)
    assert traffic.failures == []
    assert len(traffic.texts) == 1, traffic.texts


def test_a_lost_node_takes_its_group_along_and_the_group_moves(model: ModelInCluster, nodes: SimulatedNodes) -> None:
    before = model.incarnation()
    node = nodes.of_pod(model.pod(stage=1))
    node.kill()
    status = model.until_incarnation(before)
    assert failure_of(model, before)["failureClass"] == "NodeLost", model.everything()
    (group,) = status["groups"]
    assert node.name not in {stage["node"] for stage in group["stages"]}


def test_a_cut_off_nodes_stage_never_meets_the_new_group(model: ModelInCluster, nodes: SimulatedNodes) -> None:
    """Its processes run on and can still be reached; the incarnation keeps them apart. They end when it is back."""
    before = model.incarnation()
    pod = model.pod(stage=1)
    pid = model.container_pid(1, "stage")
    node = nodes.of_pod(pod)
    node.freeze()
    status = model.until_incarnation(before)
    assert failure_of(model, before)["failureClass"] == "NodeLost", model.everything()
    (group,) = status["groups"]
    assert {stage["ready"] for stage in group["stages"]} == {True}
    node.thaw()
    wait_until("the old stage has ended", lambda: not alive(pid), 150, model.everything)
    name = pod["metadata"]["name"]
    wait_until(
        "its pod is gone", lambda: name not in {p["metadata"]["name"] for p in model.pods()}, 150, model.everything
    )


def test_an_operator_killed_while_a_group_is_replaced_goes_on_where_it_was(
    model: ModelInCluster, operator: OperatorProcess
) -> None:
    before = model.incarnation()
    kill(model.container_pid(1, "stage"))

    def _is_on_record(status: dict[str, Any]) -> bool:
        return any(each["incarnation"] == before for each in status.get("lastFailures", []))

    model.until("the failure is seen", _is_on_record)
    operator.end(signal.SIGKILL)
    operator.start()
    model.until_incarnation(before)
    assert model.incarnation() == before + 1
    assert len(model.pods(incarnation=str(before + 1))) == 2


def test_neither_a_new_operator_nor_a_new_api_server_restarts_a_group(
    model: ModelInCluster, operator: OperatorProcess, control_plane: ControlPlane
) -> None:
    pods = model.pod_uids()
    operator.end(signal.SIGKILL)
    with api_server_outage(control_plane):
        pass
    operator.start()
    model.cluster.kubectl_ok("annotate", "plm", model.name, "-n", model.namespace, "--overwrite", "seen=twice")
    wait_until("it was looked at", lambda: operator.passes() >= 1, 150, operator.log_end)
    model.until_ready()
    assert model.pod_uids() == pods
