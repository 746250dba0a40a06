"""`stageline drain NODE` as typed: every stage leaves the node, and no request fails."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from processes.gateway_process import GatewayProcess

SERVES_SECONDS = 200.0


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    return {"replicas": 2, "timeouts": {"drainSeconds": 60}}


@pytest.fixture
def served(shared_model: ModelInCluster, nodes: SimulatedNodes, operator: OperatorProcess) -> ModelInCluster:
    """Both groups ready, with every node and the operator at work."""
    assert nodes.by_name
    assert operator.pid
    shared_model.until_ready(groups=2)
    return shared_model


@pytest.fixture
def node(served: ModelInCluster) -> Iterator[str]:
    """One that both groups have a stage on, if there is one; schedulable again afterwards."""
    names = [pod["spec"]["nodeName"] for pod in served.pods()]
    name = max(names, key=names.count)
    yield name
    served.cluster.kubectl_ok("uncordon", name)


def drain(model: ModelInCluster, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stageline_cli.main", "drain", *words],
        env=os.environ | {"KUBECONFIG": str(model.cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def stages_on(model: ModelInCluster, node: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in model.pods() if pod["spec"].get("nodeName") == node]


def is_cordoned(model: ModelInCluster, node: str) -> bool:
    found = model.cluster.api.get("Node", node)
    return bool(found and found["spec"].get("unschedulable"))


def test_a_dry_run_names_the_groups_and_changes_nothing(served: ModelInCluster, node: str) -> None:
    before = served.pod_uids()
    done = drain(served, node, "--dry-run")
    assert done.returncode == 0, done.stderr
    mine = [line for line in done.stdout.splitlines() if line.startswith(f"{served.namespace}/")]
    pods = [pod for pod in served.pods() if pod["spec"]["nodeName"] == node]
    there = {pod["metadata"]["labels"]["stageline.dev/group"] for pod in pods}
    assert mine == [f"{served.namespace}/{served.name} group {group} has a stage on {node}" for group in sorted(there)]
    assert not is_cordoned(served, node)
    assert served.pod_uids() == before


def test_every_stage_leaves_the_node_and_no_request_fails(
    served: ModelInCluster, node: str, shared_gateway: GatewayProcess
) -> None:
    wait_until("the gateway serves", shared_gateway.serves, SERVES_SECONDS, shared_gateway.log_end)
    with steady_traffic(shared_gateway.url, served.name) as traffic:
        wait_until("answers come", lambda: traffic.answers >= 3, SERVES_SECONDS, lambda: traffic.failures)
        done = drain(served, node)
        assert done.returncode == 0, done.stderr + served.everything()
        served.until_ready(groups=2)
    assert traffic.failures == []
    assert is_cordoned(served, node)
    assert stages_on(served, node) == []
    said = done.stdout.splitlines()
    assert said[0] == f"{node} is cordoned"
    assert said[-1].startswith(f"no stage is left on {node}"), said
    assert any(line.endswith("is being moved") for line in said), said
    failures = served.status().get("lastFailures", [])
    assert {each["failureClass"] for each in failures} <= {"Evicted"}, failures


def test_a_second_drain_has_nothing_to_do(served: ModelInCluster, node: str) -> None:
    assert drain(served, node).returncode == 0
    again = drain(served, node)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[1].startswith(f"no stage is left on {node}"), again.stdout


def test_out_of_time_it_says_what_is_left(served: ModelInCluster, node: str) -> None:
    done = drain(served, node, "--timeout-seconds", "1")
    assert done.returncode == 1, done.stdout
    words = " ".join(done.stderr.split())
    assert f"{node} still has a stage of {served.namespace}/{served.name} group" in words, words
    assert "it stays cordoned" in words
    assert "Traceback" not in done.stderr


def test_a_node_that_is_not_there_is_named(served: ModelInCluster) -> None:
    done = drain(served, "nowhere")
    assert done.returncode == 1
    assert "there is no node 'nowhere'" in " ".join(done.stderr.split()), done.stderr
