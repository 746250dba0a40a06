"""Two installations that serve the same namespace: each model has one of them, until a person hands it over."""

import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.api import wait_until
from cluster.instant_kubelet import InstantKubelet
from cluster.operator_under_test import OperatorReplica, create_model, operator_replica, wait_ready
from cluster.under_test import Cluster

SOON_SECONDS = 180.0
QUIET_SECONDS = 5.0


@pytest.fixture
def installations(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[dict[str, OperatorReplica]]:
    """By the name of their Lease, both leading. Each would give models another URL."""

    def arguments(name: str) -> tuple[str, ...]:
        url = f"--gateway-url={namespace}=http://{name}/v1"
        return ("--namespace", namespace, "--lease-namespace", namespace, "--lease-name", name, url)

    with (
        operator_replica(cluster.kubeconfig, tmp_path / "one.log", *arguments("one")) as one,
        operator_replica(cluster.kubeconfig, tmp_path / "two.log", *arguments("two")) as two,
    ):
        found = {"one": one, "two": two}
        wait_until("both lead", lambda: all(each.leads for each in found.values()), SOON_SECONDS, one.log)
        yield found


def test_a_model_of_one_installation_is_refused_by_the_other_until_it_is_handed_over(
    cluster: Cluster, namespace: str, kubelet: InstantKubelet, installations: dict[str, OperatorReplica]
) -> None:
    def logs() -> str:
        return "\n".join(each.log() for each in installations.values())

    def model() -> dict[str, Any]:
        return dict(cluster.api.get("PipelineModel", "tiny", namespace) or {})

    create_model(cluster.api, namespace, "tiny", kubelet.template)
    wait_ready(cluster.api, namespace, "tiny", SOON_SECONDS, logs)
    # Who is first writes the name of its Lease; from here on nothing changes the model.
    written, deadline = model()["metadata"]["resourceVersion"], time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        assert model()["metadata"]["resourceVersion"] == written, f"both write its status:\n{model()}\n{logs()}"
        time.sleep(0.2)
    first = model()["status"]["operator"].removeprefix(f"{namespace}/")
    (second,) = installations.keys() - {first}
    assert model()["status"]["url"] == f"http://{first}/v1"

    def refusals() -> list[str]:
        events = cluster.api.list("Event", namespace)
        return [each["message"] for each in events if each["reason"] == "OtherOperator"]

    wait_until("an Event says whose it is", refusals, SOON_SECONDS, logs)
    pods = {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)}
    installations[first].end(signal.SIGKILL)
    cluster.api.delete("Lease", first, namespace)
    command = refusals()[0].partition("kubectl ")[2]
    cluster.kubectl_ok(*shlex.split(command))
    wait_until("the other acts on it", lambda: model()["status"]["url"] == f"http://{second}/v1", SOON_SECONDS, logs)
    assert model()["status"]["operator"] == f"{namespace}/{second}"
    assert {pod["metadata"]["uid"] for pod in cluster.api.list("Pod", namespace)} == pods, "its group runs on"
