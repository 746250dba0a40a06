"""The Node object and the Lease by which a cluster knows a node and that it lives. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from stageline_local.node.pod_status import timestamp

LEASE_NAMESPACE: Final = "kube-node-lease"
LEASE_SECONDS: Final = 8
KUBELET_VERSION: Final = "v1.35.4+process-node"


@dataclass(frozen=True)
class NodeIdentity:
    """Who a node is and what it offers. `capacity` is in Kubernetes quantities, devices among them."""

    name: str
    capacity: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"


def node_manifest(node: NodeIdentity, now: datetime) -> dict[str, Any]:
    """The Node to register."""
    own = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": own | dict(node.labels)},
        "spec": {},
        "status": node_status(node, now),
    }


def node_status(node: NodeIdentity, now: datetime) -> dict[str, Any]:
    """The status of a node that lives."""
    return {
        "capacity": dict(node.capacity),
        "allocatable": dict(node.capacity),
        "addresses": [{"type": "InternalIP", "address": node.address}, {"type": "Hostname", "address": node.name}],
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "ProcessNodeReady",
                "message": "runs pods as local processes",
                "lastHeartbeatTime": timestamp(now),
            }
        ],
        "nodeInfo": {
            **dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"), ""),
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": KUBELET_VERSION,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


def lease_manifest(node: NodeIdentity, now: datetime) -> dict[str, Any]:
    """The heartbeat."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node.name, "namespace": LEASE_NAMESPACE},
        "spec": {
            "holderIdentity": node.name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": timestamp(now),
        },
    }
