"""How stages meet with `spec.network.tls`: a ring of TLS connections, each stage to the next and the last to the first.

Hidden tensors go from stage to stage, feedback from the last to the first, so each stage sends on one connection and
receives on the other. Where the next one is, the engine says in its welcome; nothing goes through torch's TCPStore,
which has no TLS. Both ends show the model's certificate; then each proves by the bus's token which stage of which
incarnation it is, as pods of other incarnations have the same certificate, and an address may have been another pod's.
"""

import hmac
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Final

from stageline_api.failures import FailureClass
from stageline_runtime.contract import PodContract, read_identity
from stageline_runtime.plan_bus.challenge import MOST_STRANGERS, link_proof
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.tls.certificates import PodIdentity, TlsError, words_of
from stageline_runtime.transport.secure_link import SecureReceiver, SecureSender

HANDSHAKE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
_PROOF_BYTES: Final = 64


def join_ring(contract: PodContract, next_address: str) -> tuple[SecureSender, SecureReceiver]:
    """Connect to the next stage and be connected to by the one before.

    Raises:
        RuntimeFailure: class RendezvousTimeout when one of them did not come in time, or TLS did not come about.
    """
    identity = read_identity(contract.config)
    assert identity is not None, "it joins by TLS without spec.network.tls"
    deadline = time.monotonic() + contract.config.timeouts.rendezvous_seconds
    with _Entrance(contract, identity) as entrance:
        sender = SecureSender(_connect(contract, identity, next_address, deadline))
        receiver = SecureReceiver(entrance.await_stage(deadline))
    return sender, receiver


def _connect(contract: PodContract, identity: PodIdentity, address: str, deadline: float) -> ssl.SSLSocket:
    """Try until the next stage takes this one in."""
    next_stage = (contract.stage + 1) % contract.stage_count
    reason = "it does not listen"
    while time.monotonic() < deadline:
        try:
            return _enter(contract, identity, address)
        except (TlsError, OSError) as error:
            reason = str(error) if isinstance(error, TlsError) else words_of(error)
            time.sleep(_POLL_SECONDS)
    raise _failure(contract, next_stage, f"{address}:{contract.master_port} does not take it in: {reason}")


def _enter(contract: PodContract, identity: PodIdentity, address: str) -> ssl.SSLSocket:
    connection = socket.create_connection((address, contract.master_port), timeout=HANDSHAKE_SECONDS)
    try:
        secure = _secure(connection, identity, is_server=False)
    except BaseException:
        connection.close()
        raise
    try:
        here, there = contract.stage, (contract.stage + 1) % contract.stage_count
        secure.sendall(_proof(contract, here, there))
        if not hmac.compare_digest(_read_proof(secure), _proof(contract, there, here)):
            raise TlsError("it is another stage, or of another incarnation")
    except BaseException:
        secure.close()
        raise
    return secure


class _Entrance:
    """Listens for the stage before, for as long as the block runs; strangers hold nobody up."""

    def __init__(self, contract: PodContract, identity: PodIdentity) -> None:
        self._contract = contract
        self._identity = identity
        self._before = (contract.stage - 1) % contract.stage_count
        self._changed = threading.Condition()
        self._found: ssl.SSLSocket | None = None
        self._reason = "nobody came"
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._is_over = False
        host, port = contract.pod_ip, contract.master_port
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            detail = f"can't listen on {host}:{port}: {error.strerror}"
            raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
        threading.Thread(target=self._accept, name="secure entrance", daemon=True).start()

    def __enter__(self) -> "_Entrance":
        return self

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._is_over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def await_stage(self, deadline: float) -> ssl.SSLSocket:
        """The connection of the stage before; raises RuntimeFailure."""
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None, max(0.0, deadline - time.monotonic()))
            if self._found is None:
                raise _failure(self._contract, self._before, f"it did not connect: {self._reason}")
            return self._found

    def _accept(self) -> None:
        while not self._is_over:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                time.sleep(_POLL_SECONDS)  # over, or without descriptors for a while
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            arguments = (connection, str(peer[0]))
            threading.Thread(target=self._let_in, args=arguments, name="secure handshake", daemon=True).start()

    def _let_in(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            secure = _secure(connection, self._identity, is_server=True)
            self._take(secure)
        except (TlsError, OSError) as error:
            connection.close()
            words = str(error) if isinstance(error, TlsError) else words_of(error)
            with self._changed:
                self._reason = f"{address} was refused: {words}"
        finally:
            self._strangers.release()

    def _take(self, secure: ssl.SSLSocket) -> None:
        here = self._contract.stage
        try:
            if not hmac.compare_digest(_read_proof(secure), _proof(self._contract, self._before, here)):
                raise TlsError("it is another stage, or of another incarnation")
            with self._changed:
                if self._is_over or self._found is not None:
                    raise TlsError("the stage before is connected already")
                secure.sendall(_proof(self._contract, here, self._before))
                self._found = secure
                self._changed.notify_all()
        except BaseException:
            secure.close()
            raise


def _secure(connection: socket.socket, identity: PodIdentity, *, is_server: bool) -> ssl.SSLSocket:
    """Raises TlsError or OSError; the connection is then still open."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    context = identity.server if is_server else identity.client
    name = None if is_server else identity.name
    secure = context.wrap_socket(connection, server_side=is_server, server_hostname=name, do_handshake_on_connect=False)
    try:
        secure.do_handshake()
        identity.check_name(secure)
    except BaseException:
        secure.close()
        raise
    return secure


def _proof(contract: PodContract, sender: int, receiver: int) -> bytes:
    life = f"{contract.config.namespace}/{contract.config.model_name}/{contract.group}/{contract.incarnation}"
    return link_proof(contract.bus_token, life, sender=sender, receiver=receiver).encode()


def _read_proof(secure: ssl.SSLSocket) -> bytes:
    found = b""
    while len(found) < _PROOF_BYTES:
        part = secure.recv(_PROOF_BYTES - len(found))
        if not part:
            raise TlsError("it hung up")
        found += part
    return found


def _failure(contract: PodContract, peer: int, reason: str) -> RuntimeFailure:
    limit_seconds = contract.config.timeouts.rendezvous_seconds
    detail = f"stage {contract.stage} did not meet stage {peer} by TLS within {limit_seconds:g} s: {reason}"
    return RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="rendezvous", peer=peer)
