"""Where starts are measured: a laptop (`stageline up --monitor`), and a cluster of a real control plane.

Both serve one model whose cache is empty at first, so that the first start is a cold one and what follows are warm.
Nodes of the cluster run pods as processes of this machine: what it adds is API server, scheduler and operator.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from boards.game_day_scenarios import pid_of_stage
from cluster.model_in_cluster import ModelInCluster, model_from_file
from cluster.operator_process import OperatorProcess
from cluster.simulated_nodes import SimulatedNodes, running_nodes
from cluster.under_test import Cluster
from processes.free_ports import free_port
from processes.serving_command import ServingCommand, kill, serving
from stageline_api import ports
from stageline_local.monitoring.scrape import OPERATOR_PATH
from stageline_local.session.state_file import read_state

QUICK: Final = {"backoffSeconds": 1, "windowSeconds": 1}
"""Every restart is a first one: the back-off is not what is measured."""
STEP_SECONDS: Final = 10
NODES: Final = ("node-a", "node-b", "node-c")
NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True)
class Place:
    """`blows` are what can be done to the model there, by what it is called; each ends its group."""

    name: str
    operator_page: Callable[[], str]
    stage_pages: Callable[[], list[str]]
    blows: Mapping[str, Callable[[], None]]
    state: Callable[[], str]
    """For a message about what did not come."""


@contextmanager
def laptop(manifest: Path, directory: Path) -> Iterator[Place]:
    """A `stageline up` with an empty cache."""
    changed = directory / "model.yaml"
    changed.write_text(yaml.safe_dump(_quick(manifest)), encoding="utf-8")
    monitor = free_port(in_a_row=2)
    options = ("--plain", "--monitor", "--monitor-port", str(monitor))
    with serving(changed, directory, directory / "cache", *options) as up:
        up.wait_for("Boards and alerts:", 600)
        name = yaml.safe_load(changed.read_text(encoding="utf-8"))["metadata"]["name"]
        yield Place(
            "laptop",
            lambda: _page(f"http://127.0.0.1:{monitor}{OPERATOR_PATH}"),
            lambda: _stage_pages(_pods_of(up, name)),
            {
                "a stage is killed": lambda: kill(pid_of_stage(up, 1)),
                f"a stage stands still (stepSeconds {STEP_SECONDS})": lambda: os.kill(
                    pid_of_stage(up, 1), signal.SIGSTOP
                ),
            },
            up.output,
        )


@contextmanager
def in_cluster(manifest: Path, directory: Path, cluster: Cluster) -> Iterator[Place]:
    """An operator, three nodes and the model, in a cluster of one's own that has the CRD."""
    operator = OperatorProcess(cluster, directory / "operator")
    with running_nodes(cluster, directory / "nodes", NODES) as nodes:
        nodes.recover()
        operator.start()
        try:
            model = model_from_file(cluster, NAMESPACE, manifest, nodes)
            model.manifest["spec"] = _quick(manifest)["spec"]
            cache = directory / "cache"
            cache.mkdir()
            model.manifest["spec"]["model"]["cache"] = {"hostPath": str(cache)}
            model.apply()
            yield Place(
                "cluster",
                operator.metrics,
                lambda: _stage_pages(model.pods()),
                {
                    "a stage is killed": lambda: kill(model.container_pid(1, "stage")),
                    "a node loses its power": lambda: _lose_node(nodes, model),
                },
                model.everything,
            )
        finally:
            operator.end()


def _quick(manifest: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    document["spec"]["restart"] = QUICK
    document["spec"]["timeouts"] = {"stepSeconds": STEP_SECONDS}
    return document


def _lose_node(nodes: SimulatedNodes, model: ModelInCluster) -> None:
    nodes.of_pod(model.pod(stage=1)).kill()


def _pods_of(up: ServingCommand, name: str) -> list[dict[str, Any]]:
    state = read_state(up.state_dir / name)
    return list(state.pods) if state is not None else []


def _stage_pages(pods: list[dict[str, Any]]) -> list[str]:
    """Of the pods that run; one that ends meanwhile has none."""
    addresses = [pod["status"]["podIP"] for pod in pods if pod.get("status", {}).get("podIP")]
    return [_page(f"http://{each}:{ports.STAGE_HEALTH}/metrics") for each in addresses]


def _page(url: str) -> str:
    """Empty where nobody answers."""
    try:
        return httpx.get(url, trust_env=False, timeout=60.0).text
    except httpx.TransportError:
        return ""
