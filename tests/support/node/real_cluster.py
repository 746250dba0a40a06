"""A whole Kubernetes cluster of real parts on one machine, inside a network, mount and PID namespace of its own.

`scripts/test-node` makes the namespaces; nothing in them reaches a network but this one, and all that runs in them ends
with them. In it: the control plane, nodes (`real_node`), one kube-proxy for the network namespace that the nodes share,
and CoreDNS. What differs from a cluster: nodes share a kernel, as kind's do; NetworkPolicies are not enforced, since
Debian has no network plugin that does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from cluster.api import wait_until
from cluster.control_plane import ControlPlane
from cluster.control_plane_binary import control_plane_binaries
from cluster.under_test import Cluster, cluster_of
from node.image_store import fill_stores
from node.node_programs import NodePrograms, node_programs
from node.real_node import RealNode
from stageline_local.node import child_exec

NAMESPACE_VARIABLE: Final = "STAGELINE_NODE_NAMESPACE"
"""Set by `scripts/test-node` inside the namespaces: what is done here would change the machine's own network."""
_PLANE_ADDRESS: Final = "10.88.0.1"
_POD_NETWORKS: Final = "10.88.0.0/13"
_READY_SECONDS: Final = 120.0
_KERNEL_SETTINGS: Final = {"kernel/panic": "10", "kernel/panic_on_oops": "1", "vm/overcommit_memory": "1"}
"""What a kubelet sets. They are the whole machine's, so it finds them set in files that only look like the kernel's."""
_PRIVATE_FOLDERS: Final = ("/run", "/var/lib/kubelet", "/var/lib/cni", "/var/log/containers")


@dataclass
class RealCluster:
    """A running cluster."""

    cluster: Cluster
    plane: ControlPlane
    nodes: tuple[RealNode, ...]

    def node_of(self, pod: dict[str, object]) -> RealNode:
        """The node that a pod is bound to."""
        spec = pod["spec"]
        assert isinstance(spec, dict)
        return next(node for node in self.nodes if node.name == spec["nodeName"])

    def is_ready(self, node: RealNode) -> bool:
        """Whether the control plane hears from the node's kubelet, and it says that it can run pods."""
        found = self.cluster.api.get("Node", node.name)
        conditions = found["status"].get("conditions", []) if found else []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def until_ready(self, node: RealNode, seconds: float = _READY_SECONDS) -> None:
        """Wait until the node is Ready."""
        wait_until(f"{node.name} is Ready", lambda: self.is_ready(node), seconds, lambda: node.log("kubelet"))


@contextmanager
def running_cluster(directory: Path, images: Path, number_of_nodes: int = 2) -> Iterator[RealCluster]:
    """A cluster for the length of the block, whose nodes have the images of the archives in `images`."""
    programs = node_programs()
    directory.mkdir(parents=True, exist_ok=True)
    _make_private(directory)
    _make_network(number_of_nodes)
    numbers = range(1, number_of_nodes + 1)
    users = {f"system:node:node-{number}": "system:nodes" for number in numbers} | {"system:kube-proxy": ""}
    plane = ControlPlane(directory / "plane", control_plane_binaries(), address=_PLANE_ADDRESS, more_users=users)
    nodes = tuple(
        RealNode(number, directory / f"node-{number}", programs, plane.kubeconfig(f"system:node:node-{number}"))
        for number in numbers
    )
    services: list[subprocess.Popen[bytes]] = []
    try:
        plane.start()
        services = [_start_proxy(directory, programs, plane), _start_dns(directory, programs, plane, nodes)]
        fill_stores(nodes, images, programs.pause)
        for node in nodes:
            node.start()
        with cluster_of(plane) as cluster:
            real = RealCluster(cluster, plane, nodes)
            for node in nodes:
                real.until_ready(node)
            yield real
    finally:
        for node in nodes:
            for name in tuple(node.processes):
                node.stop(name)
        for service in services:
            service.kill()
            service.wait()
        plane.stop()


def _make_private(directory: Path) -> None:
    """Folders and settings that belong to the whole machine become this mount namespace's own."""
    for folder in _PRIVATE_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", folder)
    for name, value in _KERNEL_SETTINGS.items():
        file = directory / name.replace("/", "-")
        file.write_text(f"{value}\n")
        _run("mount", "--bind", str(file), f"/proc/sys/{name}")


def _make_network(number_of_nodes: int) -> None:
    """A bridge for each node, an address for the API server, and routes between all of them."""
    _run("ip", "link", "set", "lo", "up")
    addresses = {"plane0": f"{_PLANE_ADDRESS}/16"}
    addresses |= {f"cni{number}": f"10.{88 + number}.0.1/16" for number in range(1, number_of_nodes + 1)}
    for bridge, address in addresses.items():
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", address, "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
    # Addresses of Services are in nobody's subnet: a packet needs a route before kube-proxy's rules see it.
    _run("ip", "route", "add", "default", "dev", "plane0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    # An answer from a pod of the same bridge must pass the rules that changed the question's address.
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1\n")


def _start_proxy(directory: Path, programs: NodePrograms, plane: ControlPlane) -> "subprocess.Popen[bytes]":
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": _POD_NETWORKS,
        "hostnameOverride": "node-1",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig("system:kube-proxy"))},
        # The table of connections is the whole machine's.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    file = directory / "kube-proxy.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return _spawn(directory, "kube-proxy", programs.kube_proxy, f"--config={file}")


def _start_dns(
    directory: Path, programs: NodePrograms, plane: ControlPlane, nodes: tuple[RealNode, ...]
) -> "subprocess.Popen[bytes]":
    file = directory / "Corefile"
    addresses = " ".join(node.address for node in nodes)
    plugin = f"kubernetes cluster.local {{\nkubeconfig {plane.admin_kubeconfig} test\n}}"
    file.write_text(f".:53 {{\nbind {addresses}\nerrors\n{plugin}\n}}\n", encoding="utf-8")
    return _spawn(directory, "coredns", programs.coredns, "-conf", str(file))


def _spawn(directory: Path, name: str, program: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
    with (directory / f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            [*wrapper, str(program), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=directory
        )


def _run(*command: str) -> None:
    assert shutil.which(command[0]) is not None, f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
