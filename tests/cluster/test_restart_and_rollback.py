"""`stageline restart` and `stageline rollback` as typed: rollouts that fail no request, and their ends."""

import os
import subprocess
import sys
from typing import Any

import pytest

from chaos.steady_traffic import steady_traffic
from cluster.api import wait_until
from cluster.model_in_cluster import ModelInCluster
from processes.gateway_process import GatewayProcess

GONE_SECONDS = 200.0


@pytest.fixture(scope="module")
def shared_spec() -> dict[str, Any]:
    return {"timeouts": {"drainSeconds": 60}}


def command(model: ModelInCluster, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stageline_cli.main", *words, "--namespace", model.namespace],
        env=os.environ | {"KUBECONFIG": str(model.cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_a_restart_replaces_every_pod_and_fails_no_request(
    model: ModelInCluster, shared_gateway: GatewayProcess
) -> None:
    wait_until("the gateway serves", shared_gateway.serves, GONE_SECONDS, shared_gateway.log_end)
    model.until_ready()
    before = model.pod_uids()
    with steady_traffic(shared_gateway.url, model.name) as traffic:
        wait_until("answers come", lambda: traffic.answers >= 3, GONE_SECONDS, lambda: traffic.failures)
        done = command(model, "restart", model.name)
        assert done.returncode == 0, done.stderr + model.everything()
    assert traffic.failures == []
    assert not before & model.pod_uids()
    said = done.stdout.splitlines()
    assert said[0] == f"{model.name}: restart of 1 group begun"
    assert said[-1] == f"{model.name}: AllGroupsReady: 1 of 1 groups are ready", said


def test_a_rollout_that_gets_nowhere_is_taken_back_and_the_groups_that_served_are_untouched(
    model: ModelInCluster,
) -> None:
    model.until_ready()
    before, revision = model.pod_uids(), model.status()["updateRevision"]
    patch = {"spec": {"template": {"image": "never.example/built:1"}}}
    model.cluster.api.patch("PipelineModel", model.name, patch, model.namespace)
    model.until("another revision", lambda status: status["updateRevision"] != revision)
    model.until("its group is there", lambda status: len(status["groups"]) == 2)

    listed = command(model, "rollback", model.name, "--list")
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:] if "(current)" not in line] == [revision]
    shown = command(model, "rollback", model.name, "--dry-run")
    assert "-  image: never.example/built:1" in shown.stdout, shown
    assert model.status()["updateRevision"] != revision, "a dry run changes nothing"

    done = command(model, "rollback", model.name)
    assert done.returncode == 0, done.stderr + model.everything()
    assert model.status()["updateRevision"] == revision
    wait_until("the new group is gone", lambda: model.pod_uids() == before, GONE_SECONDS, model.everything)

    again = command(model, "rollback", model.name)
    assert (again.returncode, again.stdout) == (1, ""), again
    assert "the rollout has ended" in again.stderr


def test_a_restart_that_stalls_or_has_no_model_says_so(model: ModelInCluster) -> None:
    nobody = command(model, "restart", "nobody")
    assert nobody.returncode == 1
    assert "there is no PipelineModel 'nobody'" in nobody.stderr
    assert "Traceback" not in nobody.stderr

    late = command(model, "restart", model.name, "--timeout-seconds", "1")
    assert late.returncode == 1
    assert "not Ready within 1 s; the rollout continues" in late.stderr, late
    model.until_ready()

    unknown = command(model, "rollback", model.name, "--to", "0000000000")
    assert unknown.returncode == 2
    assert "--to 0000000000: no such revision; available: none" in unknown.stderr, unknown
