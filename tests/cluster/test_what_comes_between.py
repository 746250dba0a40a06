"""A person or a machine drains, deletes, makes anew or kills while the operator acts: nothing is left or doubled."""

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import TOLERATION, InstantKubelet, instant_kubelet
from cluster.model_in_cluster import ModelInCluster, small_model
from cluster.operator_process import OperatorProcess
from cluster.operator_under_test import operator_replica
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster
from stageline_api import labels

SOON_SECONDS = 180.0
KINDS = ("Pod", "Service", "ConfigMap", "Secret", "PodDisruptionBudget", "NetworkPolicy")


@pytest.fixture
def model(cluster: Cluster, operator: OperatorProcess, kubelet: InstantKubelet, namespace: str) -> ModelInCluster:
    """Not applied yet; its pods run nothing."""
    assert operator.pid
    return small_model(cluster, namespace, Path("/models/tiny"), None, template=kubelet.template)


def names(model: ModelInCluster) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in model.pods())


def left_of(model: ModelInCluster) -> list[str]:
    found = ((kind, model.cluster.api.list(kind, model.namespace, {labels.MODEL: model.name})) for kind in KINDS)
    return [f"{kind} {each['metadata']['name']}" for kind, objects in found for each in objects]


@pytest.fixture
def two_nodes(cluster: Cluster) -> Iterator[list[InstantKubelet]]:
    with cluster.connect() as client, ExitStack() as stack:
        yield [stack.enter_context(instant_kubelet(client, **{"example.org/slot": "4"})) for _ in range(2)]


def test_a_drained_node_gives_its_groups_up_one_by_one(model: ModelInCluster, two_nodes: list[InstantKubelet]) -> None:
    """Two groups of two stages on one node. `kubectl drain` asks for all four pods and gets them one at a time."""
    first, second = two_nodes
    slot = {"example.org/slot": "1"}
    model.cluster.kubectl_ok("cordon", second.name)
    model.apply(replicas=2, template={"tolerations": [TOLERATION], "resources": {"limits": slot, "requests": slot}})
    model.until_ready(groups=2)
    model.cluster.kubectl_ok("uncordon", second.name)
    assert {pod["spec"]["nodeName"] for pod in model.pods()} == {first.name}
    drain = ("drain", first.name, "--delete-emptydir-data", "--ignore-daemonsets", f"--timeout={SOON_SECONDS:g}s")
    done: list[Any] = []
    draining = threading.Thread(target=lambda: done.append(model.cluster.kubectl(*drain)))
    draining.start()
    serving = []
    while draining.is_alive():
        serving.append(model.status()["readyReplicas"])
        draining.join(0.1)
    assert done[0].returncode == 0, done[0].stderr + model.everything()
    assert min(serving) >= 1, serving
    model.until_ready(groups=2)
    assert {pod["spec"]["nodeName"] for pod in model.pods()} == {second.name}
    # These pods end so fast that the operator may find them gone already.
    failures = {
        (each["group"], each["failureClass"] in ("Evicted", "NodeLost")) for each in model.status()["lastFailures"]
    }
    assert failures == {(0, True), (1, True)}, model.everything()


def test_a_namespace_deleted_under_a_model_that_serves_goes_without_a_complaint(
    cluster: Cluster, operator: OperatorProcess, kubelet: InstantKubelet, namespace: str
) -> None:
    doomed = f"{namespace}-doomed"
    cluster.kubectl_ok("create", "namespace", doomed)
    # A pod that is made before it is there is refused, which would be a complaint.
    cluster.kubectl_ok("wait", "--for=create", "serviceaccount/default", "-n", doomed, "--timeout=120s")
    model = small_model(cluster, doomed, Path("/models/tiny"), None, template=kubelet.template, replicas=2)
    model.apply()
    model.until_ready(groups=2)
    cluster.kubectl_ok("delete", "namespace", doomed, f"--timeout={SOON_SECONDS:g}s")
    lines = [json.loads(line) for line in operator.log_file.read_text().splitlines() if doomed in line]
    assert lines, operator.log_end()
    assert not [line for line in lines if line["level"] not in ("info", "debug")], lines


def test_a_model_made_anew_before_the_old_ones_pods_are_gone_waits_for_them(model: ModelInCluster) -> None:
    """As `kubectl replace --force` does it. One old pod ends slowly; no pod of the new model meets it."""
    model.apply()
    model.until_ready()
    old = model.get()["metadata"]["uid"]
    slow = model.pod(1)["metadata"]["name"]
    held = {"metadata": {"finalizers": ["example.org/slow"]}}
    model.cluster.api.patch("Pod", slow, held, model.namespace)
    model.cluster.kubectl_ok("delete", "plm", model.name, "-n", model.namespace, "--wait=false")
    wait_until("the old model is gone", lambda: is_gone(model, old), SOON_SECONDS, model.everything)
    model.apply()
    model.until("the old pod is waited for", lambda status: bool(status.get("groups")), SOON_SECONDS)
    wait_until("only the slow pod is left", lambda: names(model) == [slow], SOON_SECONDS, model.everything)
    model.cluster.api.patch("Pod", slow, {"metadata": {"finalizers": None}}, model.namespace)
    model.until_ready()
    assert names(model) == [f"{model.name}-0-2-0", f"{model.name}-0-2-1"]
    owners = {owner["uid"] for pod in model.pods() for owner in pod["metadata"]["ownerReferences"]}
    assert owners == {model.get()["metadata"]["uid"]} != {old}
    assert model.status().get("lastFailures", []) == []


def is_gone(model: ModelInCluster, uid: str) -> bool:
    found = model.cluster.api.get("PipelineModel", model.name, model.namespace)
    return found is None or found["metadata"]["uid"] != uid


def test_an_operator_killed_while_groups_are_added_makes_each_of_them_once(
    model: ModelInCluster, operator: OperatorProcess
) -> None:
    model.apply()
    model.until_ready()
    where = ("plm", model.name, "-n", model.namespace)
    model.cluster.kubectl_ok("scale", *where, "--replicas=6")
    wait_until("it has begun", model.is_observed, SOON_SECONDS, model.everything)
    operator.end(signal.SIGKILL)
    model.cluster.kubectl_ok("scale", *where, "--replicas=5")
    operator.start()
    status = model.until_ready(groups=5)
    wanted = [f"{model.name}-{g['index']}-{g['incarnation']}-{stage}" for g in status["groups"] for stage in (0, 1)]
    wait_until("no pod is left over", lambda: names(model) == sorted(wanted), SOON_SECONDS, model.everything)
    assert status.get("lastFailures", []) == []


def test_two_operators_that_both_act_still_make_one_of_each(
    model: ModelInCluster, operator: OperatorProcess, kubelet: InstantKubelet, tmp_path: Path
) -> None:
    """One of them has no lease. Every write tests what it was computed from, so that one of the two is too late."""
    arguments = ("--namespace", model.namespace, "--no-leader-elect")
    with operator_replica(model.cluster.kubeconfig, tmp_path / "log", *arguments) as second:
        model.apply(replicas=3)
        model.until_ready(groups=3)
        kubelet.end_container(model.pod(1, group=2), 66, "out of device memory")
        model.until_incarnation(1, group=2)
        model.apply(engine={**model.manifest["spec"]["engine"], "seed": 7})
        status = model.until_ready(groups=3)
        assert [each["failureClass"] for each in status["lastFailures"]] == ["OutOfMemory"]
        wanted = [f"{model.name}-{g['index']}-{g['incarnation']}-{stage}" for g in status["groups"] for stage in (0, 1)]
        assert names(model) == sorted(wanted)
        assert second.process.poll() is None, second.log()
        assert operator.process is not None
        assert operator.process.poll() is None, operator.log_end()


def test_a_model_deleted_while_it_is_fetched_leaves_nothing(
    cluster: Cluster, operator: OperatorProcess, nodes: SimulatedNodes, namespace: str
) -> None:
    """The Hub takes the connection and never answers."""
    assert operator.pid
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = {"name": "HF_ENDPOINT", "value": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        model = small_model(cluster, namespace, Path("/nowhere"), nodes, template={"env": [hub]})
        model.apply(model={"source": "hf://example/tiny"})
        connection, _ = accepted(silent)
        with connection:
            wait_until("its fetching is known", lambda: is_fetching(model), SOON_SECONDS, model.everything)
            cluster.kubectl_ok("delete", "plm", model.name, "-n", namespace, f"--timeout={SOON_SECONDS:g}s")
            wait_until("nothing is left", lambda: not left_of(model), SOON_SECONDS, lambda: left_of(model))


def accepted(server: socket.socket) -> tuple[socket.socket, Any]:
    server.settimeout(SOON_SECONDS)
    return server.accept()


def is_fetching(model: ModelInCluster) -> bool:
    prepares = [each for pod in model.pods() for each in pod["status"].get("initContainerStatuses", [])]
    return any("running" in each["state"] for each in prepares)
