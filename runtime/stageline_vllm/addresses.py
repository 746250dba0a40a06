"""Where the parts of one vLLM group listen: decided from the pod contract alone, so that all decide alike. Pure.

On a cluster each pod has a network of its own. On one machine pods have loopback addresses of their own, but
127.0.0.1 and what listens on all addresses (vLLM's rendezvous) are shared by all groups: then the pod's own address and
a port of the group's own keep them apart.
"""

import ipaddress
from typing import Final

from stageline_api import ports

RENDEZVOUS_PORTS: Final = 2999
"""How many groups on one machine get distinct ports; all lie below the system's ephemeral ports.

The contract's own port is excluded: a listener on it for all addresses takes it from every pod of the machine.
"""


def http_host(pod_ip: str) -> str:
    """Address of stage 0 on which vLLM's server listens: one that only its own pod reaches."""
    return pod_ip if _is_loopback(pod_ip) else "127.0.0.1"


def http_url(pod_ip: str) -> str:
    """Base URL of vLLM's server, for processes in stage 0's pod."""
    host = http_host(pod_ip)
    return f"http://[{host}]:{ports.VLLM_HTTP}" if ":" in host else f"http://{host}:{ports.VLLM_HTTP}"


def rendezvous_port(master_address: str, given: int = ports.RENDEZVOUS) -> int:
    """Port of worker 0's store; `master_address` is stage 0's pod, as a name or an address."""
    if not _is_loopback(master_address):
        return given
    return given + 1 + int(ipaddress.ip_address(master_address)) % RENDEZVOUS_PORTS


def network_interface(pod_ip: str, given: str | None) -> str | None:
    """Interface for gloo and NCCL; None lets them use the interface of the host's name."""
    return "lo" if given is None and _is_loopback(pod_ip) else given


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
