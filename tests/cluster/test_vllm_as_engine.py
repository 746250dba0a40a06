"""A model that vLLM runs, in a cluster: it answers, its dead are named, and a rollout comes and goes between engines.

vLLM is a stand-in with real processes and sockets that computes nothing; operator, gateway, engine and supervisors are
the real ones. The stages' image is the one that the operator names for vLLM, without Stageline in it: what they need
comes on a volume. The tests share one model; each leaves it ready, under vLLM.
"""

from typing import Any

import pytest

from chaos.steady_traffic import SteadyTraffic, steady_traffic
from cluster.api import wait_until
from cluster.model_in_cluster import READY_SECONDS, ModelInCluster
from cluster.operator_process import VLLM_IMAGE
from processes.gateway_process import GatewayProcess
from processes.serving_command import command_line, descendants, kill

SOON_SECONDS = 150.0
WORKER_MODULE = "processes.fake_vllm.worker"
SIZES = {"dtype": "float32", "maxNumSeqs": 4, "maxModelLen": 256}
VLLM = SIZES | {"name": "vllm"}
OWN = SIZES | {"name": "stageline"}


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    """The interpreter of a real image has vLLM; here the nodes name one that finds the stand-in."""
    return {
        "engine": VLLM,
        "restart": {"backoffSeconds": 1, "windowSeconds": 5},
        "timeouts": {"resumeWindowSeconds": round(READY_SECONDS), "drainSeconds": 120},
    }


def until_served(gateway: GatewayProcess) -> None:
    """Until the gateway knows a group."""
    wait_until("the gateway serves", gateway.serves, SOON_SECONDS, gateway.log_end)


def until_answers(traffic: SteadyTraffic, gateway: GatewayProcess, count: int) -> None:
    """Until that many more answers have come."""
    wanted = traffic.answers + count
    wait_until(
        f"{count} more answers", lambda: traffic.answers >= wanted or traffic.failures, SOON_SECONDS, gateway.log_end
    )


def worker_pid(model: ModelInCluster, stage: int) -> int:
    """vLLM's worker in a stage's pod: a child of the node that the supervisor started."""
    supervisor = model.container_pid(stage, "stageline_vllm.supervisor")
    workers = [pid for pid in descendants(supervisor) if WORKER_MODULE in command_line(pid)]
    assert len(workers) == 1, model.everything()
    return workers[0]


def test_a_killed_worker_is_named_and_no_answer_is_lost_with_its_group(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    until_served(shared_gateway)
    assert {each["image"] for each in model.pod(1)["spec"]["containers"]} == {VLLM_IMAGE}
    before = model.incarnation()
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        until_answers(traffic, shared_gateway, 3)
        kill(worker_pid(model, stage=1))
        model.until_incarnation(before)
        until_answers(traffic, shared_gateway, 10)
    assert traffic.failures == []
    assert len(traffic.texts) == 1, "a greedy answer is the same, whichever group ended it"
    (failure,) = (each for each in model.status()["lastFailures"] if each["incarnation"] == before)
    assert (failure["stage"], failure["container"], failure["failureClass"]) == (1, "stage", "Killed"), failure
    assert "vLLM's worker was killed" in failure["message"]


def test_a_model_is_rolled_from_engine_to_engine_and_no_request_is_lost(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    """To the own runtime and back, each by nothing but another `spec.engine`, under traffic."""
    until_served(shared_gateway)
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        until_answers(traffic, shared_gateway, 3)
        for engine in (OWN, VLLM):
            revision = model.status()["groups"][0]["revision"]
            model.apply(engine=engine)
            until_only_the_new_revision(model, revision)
            until_answers(traffic, shared_gateway, 10)
    assert traffic.failures == []
    assert len(traffic.texts) == 2, "no answer is begun by one engine and ended by the other"


def until_only_the_new_revision(model: ModelInCluster, old: str) -> None:
    """Until a rollout is over; there is always a group that serves."""
    fewest = 1

    def _rolled(status: dict[str, Any]) -> bool:
        nonlocal fewest
        fewest = min(fewest, status["readyReplicas"])
        return old not in {group["revision"] for group in status["groups"]} and not model.pods(revision=old)

    model.until("only the new revision is left", _rolled)
    model.until_ready()
    assert fewest == 1, model.everything()
