"""Pod addresses: each pod leases its own loopback address, so that the contract's ports never collide.

Linux routes all of 127.0.0.0/8 to the loopback device, so every address in it can be bound without set-up. A lease is
an exclusive `flock` on a file named after the address; the kernel drops it when the node dies, even by SIGKILL. An
address is skipped if another program uses a contract port on it. If the port is in use on many addresses in a row, a
program listens on all addresses, and the error names that port.
"""

import fcntl
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stageline_api import ports
from stageline_api.errors import UserError

CONTRACT_PORTS: Final = (
    ports.ENGINE_HTTP,
    ports.ENGINE_STATE,
    ports.PLAN_BUS,
    ports.RENDEZVOUS,
    ports.STAGE_HEALTH,
    ports.VLLM_HTTP,
)
_FIRST_SUBNET: Final = 64
_SUBNETS: Final = 128
_HOSTS: Final = 254
_MAX_REFUSALS: Final = 64
"""After so many unleased addresses in a row with the same port in use, the port is in use on all addresses."""


@dataclass(frozen=True)
class AddressLease:
    address: str
    lock_fd: int

    def release(self) -> None:
        """Drop the lock. The lock file stays: removing it would allow two processes to lock two files of one name."""
        os.close(self.lock_fd)


class AddressPool:
    """Leases addresses 127.64.0.1 to 127.191.255.254, starting at a place that depends on the process id.

    Addresses are assigned in rising order, so they are not reused soon: a new incarnation never meets its predecessor's
    connections in TIME_WAIT.
    """

    def __init__(self, lock_dir: Path | None = None, wanted_ports: Sequence[int] = CONTRACT_PORTS) -> None:
        if sys.platform != "linux":
            raise UserError(
                f"running a pipeline on one machine needs Linux (this is {sys.platform}): only Linux lets every pod "
                "have a loopback address of its own; use a cluster or a Linux virtual machine"
            )
        self._lock_dir = lock_dir or Path(tempfile.gettempdir()) / f"stageline-addresses-{os.getuid()}"
        self._lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wanted_ports = wanted_ports
        self._candidates = _candidates(start=os.getpid())

    def lease(self) -> AddressLease:
        """Return the next free address.

        Raises:
            UserError: the whole range is leased, or a program listens on a contract port of every address.
        """
        refusals: Counter[int] = Counter()
        for address in self._candidates:
            lease = self._try_lock(address)
            if lease is None:
                continue
            port = next((port for port in self._wanted_ports if not can_bind(address, port)), None)
            if port is None:
                return lease
            lease.release()
            refusals[port] += 1
            if refusals[port] == _MAX_REFUSALS:
                raise UserError(
                    f"port {port} is taken on {_MAX_REFUSALS} loopback addresses in a row, the last one {address}: "
                    f"something on this machine listens on *:{port} (`ss -ltnp 'sport = :{port}'` names it), and every "
                    "pod needs that port on an address of its own; end it, or have it listen on one address"
                )
        raise UserError("no loopback address is free in 127.64.0.0 to 127.191.255.255; stop other `stageline up` runs")

    def _try_lock(self, address: str) -> AddressLease | None:
        lock_fd = os.open(self._lock_dir / address, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            return None
        return AddressLease(address, lock_fd)


def _candidates(start: int) -> Iterator[str]:
    """Every address of the range once, starting at subnet `start`."""
    for offset in range(_SUBNETS * 256):
        subnet, third = divmod((start * 7 + offset) % (_SUBNETS * 256), 256)
        for host in range(1, _HOSTS + 1):
            yield f"127.{_FIRST_SUBNET + subnet}.{third}.{host}"


def can_bind(address: str, port: int) -> bool:
    """Whether a listener can be opened on `address`:`port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError:
            return False
    return True
