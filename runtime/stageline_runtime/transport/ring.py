"""How stages meet: a ring of connections, each stage to the next and the last to the first.

Hidden tensors go from stage to stage, feedback from the last to the first, so each stage sends on one connection and
receives on the other. A stage listens before it says hello to the engine, on a free port, and tells it where; the
engine's welcome tells where the next stage listens. Each end of a connection proves by the bus's token, over numbers
that both draw for that connection alone, which stage of which incarnation it is: an address may have been another
pod's, and pods of other incarnations have the same token and the same certificate. With `spec.network.tls` both ends
show the model's certificate before that; else what crosses is in clear.
"""

import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stageline_api.failures import FailureClass
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import MOST_STRANGERS, NONCE_BYTES, link_proof
from stageline_runtime.plan_bus.messages import LinkAddress
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.tls.certificates import PodIdentity, TlsError, words_of

HANDSHAKE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
_PROOF_BYTES: Final = 64
_BACKLOG: Final = 128
_SIOCGIFADDR: Final = 0x8915
_IFREQ: Final = struct.Struct("16s24x")
_ADDRESS_AT: Final = slice(20, 24)
"""Of the IPv4 address in what the kernel answers: behind the name, a family and a port."""
_INET6: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPES: Final = ("00", "10")
"""Addresses that need no interface beside them: global ones, and loopback's."""


class LinkRefusedError(Exception):
    """The other end of a connection is not the stage that it should be; a sentence without a secret."""


def listen(contract: PodContract) -> socket.socket:
    """What the stage before connects to, on the pod's own address or that of `spec.network.interface`.

    Nobody is answered before the ring is joined.

    Raises:
        RuntimeFailure: class BadConfig, there is no such interface; Internal, the address can't be listened on.
    """
    interface = contract.config.network_interface
    host = contract.pod_ip if interface is None else address_of(interface)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        detail = f"can't listen on {host}: {error.strerror}"
        raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error


def address_of(interface: str) -> str:
    """The first address of a network interface, IPv4 before IPv6; raises RuntimeFailure (BadConfig)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, _IFREQ.pack(interface.encode()))
        return socket.inet_ntoa(answer[_ADDRESS_AT])
    # It has none of IPv4, or there is no such interface.
    for line in _INET6.read_text().splitlines() if _INET6.exists() else ():
        number, _index, _prefix, scope, _flags, name = line.split()
        if name == interface and scope in _GLOBAL_SCOPES:
            return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    raise RuntimeFailure(
        FailureClass.BAD_CONFIG,
        f"spec.network.interface {interface}: this pod has no such interface with an address",
        operation="rendezvous",
    )


def link_address(listener: socket.socket) -> LinkAddress:
    """What a stage tells the engine of its listener."""
    return LinkAddress(*listener.getsockname()[:2])


def join_ring(
    contract: PodContract, listener: socket.socket, next_address: LinkAddress, identity: PodIdentity | None
) -> tuple[socket.socket, socket.socket]:
    """Connect to the next stage and be connected to by the one before: what to send on, and what to receive from.

    With an `identity` both are in TLS. The caller closes `listener`.

    Raises:
        RuntimeFailure: class RendezvousTimeout when one of them did not come in time, or is not taken in.
    """
    deadline = time.monotonic() + contract.config.timeouts.rendezvous_seconds
    with _Entrance(contract, listener, identity) as entrance:
        next_stage = _connect(contract, next_address, identity, deadline)
        with _closed_on_failure(next_stage):
            return next_stage, entrance.await_stage(deadline)


def _connect(contract: PodContract, there: LinkAddress, identity: PodIdentity | None, deadline: float) -> socket.socket:
    """Try until the next stage takes this one in."""
    next_stage = (contract.stage + 1) % contract.stage_count
    reason = "it does not listen"
    while time.monotonic() < deadline:
        try:
            return _enter(contract, there, identity, next_stage)
        except (LinkRefusedError, TlsError, OSError) as error:
            reason = words_of(error)
            time.sleep(_POLL_SECONDS)
    raise _failure(contract, next_stage, f"{there.host}:{there.port} does not take it in: {reason}")


def _enter(contract: PodContract, there: LinkAddress, identity: PodIdentity | None, next_stage: int) -> socket.socket:
    connection = _secured(socket.create_connection(there, timeout=HANDSHAKE_SECONDS), identity, is_server=False)
    with _closed_on_failure(connection):
        own = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(own)
        numbers = own + _read(connection, NONCE_BYTES)
        connection.sendall(_proof(contract, contract.stage, next_stage, numbers))
        _check_proof(connection, _proof(contract, next_stage, contract.stage, numbers))
    return connection


class _Entrance:
    """Accepts the connection of the previous stage while the block runs; unknown connections delay no stage.

    If the block fails, the accepted connection is closed, since no other code would close it.
    """

    def __init__(self, contract: PodContract, listener: socket.socket, identity: PodIdentity | None) -> None:
        self._contract = contract
        self._listener = listener
        self._identity = identity
        self._before = (contract.stage - 1) % contract.stage_count
        self._came: Future[socket.socket] = Future()
        """The connection of the previous stage; cancelled when no more connections are accepted."""
        self._coming = threading.Lock()
        self._reason = "nobody came"
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)

    def __enter__(self) -> "_Entrance":
        threading.Thread(target=self._accept, name="ring entrance", daemon=True).start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_error: object) -> None:
        with self._coming:
            if not self._came.cancel() and failure is not None:
                self._came.result().close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def await_stage(self, deadline: float) -> socket.socket:
        """The connection of the stage before; raises RuntimeFailure."""
        try:
            return self._came.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise _failure(self._contract, self._before, f"it did not connect: {self._reason}") from None

    def _accept(self) -> None:
        while not self._came.done():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                time.sleep(_POLL_SECONDS)  # over, or without descriptors for a while
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            arguments = (connection, str(peer[0]))
            threading.Thread(target=self._let_in, args=arguments, name="ring handshake", daemon=True).start()

    def _let_in(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            self._take(_secured(connection, self._identity, is_server=True))
        except (LinkRefusedError, TlsError, OSError) as error:
            self._reason = f"{address} was refused: {words_of(error)}"
        finally:
            self._strangers.release()

    def _take(self, connection: socket.socket) -> None:
        here = self._contract.stage
        with _closed_on_failure(connection):
            others = _read(connection, NONCE_BYTES)
            own = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(own)
            _check_proof(connection, _proof(self._contract, self._before, here, others + own))
            with self._coming:
                if self._came.done():
                    raise LinkRefusedError("the stage before is connected already")
                connection.sendall(_proof(self._contract, here, self._before, others + own))
                self._came.set_result(connection)


def _secured(connection: socket.socket, identity: PodIdentity | None, *, is_server: bool) -> socket.socket:
    """In TLS with an `identity`; raises TlsError or OSError, and closes the connection then."""
    with _closed_on_failure(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if identity is None:
            return connection
        context, name = (identity.server, None) if is_server else (identity.client, identity.name)
        secure = context.wrap_socket(connection, server_side=is_server, server_hostname=name)
    with _closed_on_failure(secure):  # the other one is no longer open
        identity.check_name(secure)
    return secure


@contextmanager
def _closed_on_failure(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _proof(contract: PodContract, speaker: int, listener: int, numbers: bytes) -> bytes:
    place = f"{contract.config.namespace}/{contract.config.model_name}/{contract.group}"
    life = f"{place}/{contract.incarnation}/{contract.rank}"
    return link_proof(contract.bus_token, life, numbers, speaker=speaker, listener=listener).encode()


def _check_proof(connection: socket.socket, wanted: bytes) -> None:
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), wanted):
        raise LinkRefusedError("it is another stage, or of another incarnation")


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise LinkRefusedError("it hung up")
        found += part
    return found


def _failure(contract: PodContract, peer: int, reason: str) -> RuntimeFailure:
    words = "" if contract.config.tls is None else " by TLS"
    limit_seconds = contract.config.timeouts.rendezvous_seconds
    detail = f"stage {contract.stage} did not meet stage {peer}{words} within {limit_seconds:g} s: {reason}"
    return RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="rendezvous", peer=peer)
