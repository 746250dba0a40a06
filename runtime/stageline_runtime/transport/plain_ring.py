"""How stages meet without TLS: each listens on a free port and finds the next stage's in the rendezvous store.

The store is guarded, so nobody without the bus's token leads a stage elsewhere; who connects proves that it knows it
(`ring`). What crosses after that is in clear.
"""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

from stageline_api.failures import FailureClass
from stageline_runtime.contract import PodContract
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.guarded_store import GuardedStore
from stageline_runtime.transport.ring import Meeting, in_clear, join_ring

_SIOCGIFADDR: Final = 0x8915
_IFREQ: Final = struct.Struct("16s24x")
_ADDRESS_AT: Final = slice(20, 24)
"""Of the IPv4 address in what the kernel answers: behind the name, a family and a port."""
_INET6: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPES: Final = ("00", "10")
"""Addresses that need no interface beside them: global ones, and loopback's."""


def join_plain_ring(contract: PodContract, store: GuardedStore, scope: str) -> tuple[socket.socket, socket.socket]:
    """What to send on, and what to receive from. `scope` names this rank of this incarnation in the store.

    Raises:
        RuntimeError: a stage said nothing in the store in time, or a stranger did.
        RuntimeFailure: class RendezvousTimeout when a neighbour did not come; BadConfig, there is no such interface.
    """

    def find_next(own: tuple[str, int]) -> tuple[str, int]:
        store.set(f"{scope}/link/{contract.stage}", f"{own[0]} {own[1]}")
        host, port = store.get(f"{scope}/link/{(contract.stage + 1) % contract.stage_count}").decode().split()
        return host, int(port)

    interface = contract.config.network_interface
    host = contract.pod_ip if interface is None else address_of(interface)
    return join_ring(contract, Meeting(listen=(host, 0), find_next=find_next, wrap=in_clear))


def address_of(interface: str) -> str:
    """The first address of a network interface, IPv4 before IPv6; raises RuntimeFailure (BadConfig)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, _IFREQ.pack(interface.encode()))
            return socket.inet_ntoa(answer[_ADDRESS_AT])
        except OSError:
            pass  # none of IPv4, or no such interface
    for line in _INET6.read_text().splitlines() if _INET6.exists() else ():
        number, _index, _prefix, scope, _flags, name = line.split()
        if name == interface and scope in _GLOBAL_SCOPES:
            return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    raise RuntimeFailure(
        FailureClass.BAD_CONFIG,
        f"spec.network.interface {interface}: this pod has no such interface with an address",
        operation="rendezvous",
    )
