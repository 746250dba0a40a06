"""Nodes of a test cluster: process nodes in processes of their own, which can die, fall silent and come back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.node_pods import IMAGE
from cluster.under_test import Cluster
from processes.ended_process import end_process
from processes.serving_command import alive, command_line, descendants
from processes.vllm_group import interpreter_with_vllm
from stageline_local.node import child_exec
from stageline_local.session.local_overrides import LOCAL_IMAGE
from stageline_vllm.supervisor.process import INTERPRETER_VARIABLE

NODE_READY_SECONDS: Final = 150.0
_SUPPORT: Final = Path(__file__).parents[1]
"""Where the node's own program is found."""
_END_SECONDS: Final = 60.0
_RULES: Final[list[dict[str, list[str]]]] = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": [""], "resources": ["nodes/status", "pods/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "patch"]},
]


def node_permissions() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the nodes' user may do: a kubelet's part, and reading all pods, whose names DNS would know."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "process-node"}}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "stageline-node"}
    binding = {
        **role,
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "process-node"},
        "subjects": [subject],
    }
    return {**role, "rules": _RULES}, binding


@dataclass
class SimulatedNode:
    """One node. Its containers end with it when it is killed, and run on when it is frozen."""

    name: str
    plane: ControlPlane
    cluster: Cluster
    directory: Path
    capacity: dict[str, str] = field(default_factory=lambda: {"nvidia.com/gpu": "8"})
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start the node, again if need be."""
        self.directory.mkdir(parents=True, exist_ok=True)
        options = [f"--capacity={name}={amount}" for name, amount in self.capacity.items()]
        options += [f"--image={image}" for image in (LOCAL_IMAGE, IMAGE)]
        options += ["--kubeconfig", str(self.plane.kubeconfig("stageline-node")), "--state-dir", str(self.directory)]
        options += ["--node", self.name, "--label", f"topology.kubernetes.io/zone=zone-{self.name}"]
        with_vllm = interpreter_with_vllm(self.directory)
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "cluster.kubelet", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": str(_SUPPORT), INTERPRETER_VARIABLE: str(with_vllm)},
            )

    @property
    def log_file(self) -> Path:
        """What the agent says."""
        return self.directory / "agent.log"

    def wait_ready(self) -> None:
        """Until the cluster would bind pods to it."""
        wait_until(f"{self.name} is ready", self.is_ready, NODE_READY_SECONDS, self._log_end)

    def is_ready(self) -> bool:
        """Whether the cluster believes that the node lives and has no taint."""
        node = self.cluster.api.get("Node", self.name)
        if node is None or node["spec"].get("taints"):
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])

    def kill(self) -> None:
        """The machine loses power: agent and containers are gone at once."""
        process = self._started()
        children = descendants(process.pid)
        process.kill()
        process.wait(timeout=_END_SECONDS)
        wait_until("the containers are gone", lambda: not any(alive(pid) for pid in children), _END_SECONDS)
        self.process = None

    @property
    def pid(self) -> int:
        """Process id of the agent, while it runs."""
        return self._started().pid

    def freeze(self) -> None:
        """The network is cut: no heartbeat and no deletion gets through, the containers run on."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """The network is back."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the node and its containers, whatever state it is in."""
        if self.process is None:
            return
        self.thaw()
        end_process(self.process, _END_SECONDS)
        self.process = None

    def container_pid(self, namespace: str, pod: str, command: str) -> int | None:
        """Process id of the pod's container whose command line ends with `command`."""
        directory = self.directory / "pods" / (pod if namespace == "default" else f"{namespace}.{pod}")
        for pid in descendants(self._started().pid):
            try:
                works_there = Path(f"/proc/{pid}/cwd").readlink() == directory
            except OSError:
                continue
            if works_there and command_line(pid)[-1:] == [command]:
                return pid
        return None

    def container_log(self, namespace: str, pod: str, container: str) -> str:
        """Output of a container; empty when there is none."""
        directory = pod if namespace == "default" else f"{namespace}.{pod}"
        path = self.directory / "logs" / directory / f"{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _started(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None, f"{self.name} is not running"
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self._log_end()}"
        return self.process

    def _log_end(self) -> str:
        return self.log_file.read_text(errors="replace")[-3000:] if self.log_file.exists() else ""


class SimulatedNodes:
    """The nodes of the cluster under test; every one starts with the first and ends with the run."""

    def __init__(self, plane: ControlPlane, cluster: Cluster, directory: Path) -> None:
        self._plane, self._cluster, self._directory = plane, cluster, directory
        self.by_name: dict[str, SimulatedNode] = {}
        cluster.apply(*node_permissions())

    def add(self, name: str, **capacity: str) -> SimulatedNode:
        """Start a node."""
        node = SimulatedNode(name, self._plane, self._cluster, self._directory / name)
        node.capacity |= capacity
        self.by_name[name] = node
        node.start()
        return node

    def remove(self, name: str) -> None:
        """End a node and forget it."""
        self.by_name.pop(name).stop()
        self._cluster.api.delete("Node", name)

    def of_pod(self, pod: dict[str, Any]) -> SimulatedNode:
        """The node that a pod is bound to."""
        return self.by_name[pod["spec"]["nodeName"]]

    def recover(self) -> None:
        """After a test that broke nodes: bring every one back."""
        for node in self.by_name.values():
            if node.process is None or node.process.poll() is not None:
                node.start()
            else:
                node.thaw()
        for node in self.by_name.values():
            node.wait_ready()

    def stop(self) -> None:
        """End every node; several at once, since each ends its containers first."""
        for node in self.by_name.values():
            if node.process is not None and node.process.poll() is None:
                node.thaw()
                node.process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for node in self.by_name.values():
            if node.process is not None:
                try:
                    node.process.wait(timeout=max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    node.process.kill()
                    node.process.wait(timeout=_END_SECONDS)


@contextmanager
def running_nodes(cluster: Cluster, directory: Path, names: Sequence[str]) -> Iterator[SimulatedNodes]:
    """Nodes of these names, started, on the cluster's own control plane; they end with the block."""
    assert cluster.plane is not None
    found = SimulatedNodes(cluster.plane, cluster, directory)
    try:
        for name in names:
            found.add(name)
        yield found
    finally:
        found.stop()
