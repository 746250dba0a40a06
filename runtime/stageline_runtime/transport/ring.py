"""How stages meet on connections of the runtime's own: a ring, each stage to the next and the last to the first.

Hidden tensors go from stage to stage, feedback from the last to the first, so each stage sends on one connection and
receives on the other. Each end of a connection proves by the bus's token, over numbers that both draw for that
connection alone, which stage of which incarnation it is: an address may have been another pod's, and pods of other
incarnations have the same token and the same certificate. What bytes cross in is the caller's to say (`Wrap`).
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from stageline_api.failures import FailureClass
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import MOST_STRANGERS, NONCE_BYTES, link_proof
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.tls.certificates import words_of

HANDSHAKE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
_PROOF_BYTES: Final = 64


class LinkRefusedError(Exception):
    """The other end of a connection is not the stage that it should be; a sentence without a secret."""


class Wrap(Protocol):
    def __call__(self, connection: socket.socket, *, is_server: bool) -> socket.socket:
        """What the bytes of a connection cross in; raises LinkRefusedError or OSError and leaves closing to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How one stage takes part in the ring."""

    listen: tuple[str, int]
    """Where the stage before connects to; port 0 takes a free one."""
    find_next: Callable[[tuple[str, int]], tuple[str, int]]
    """Told where this stage listens, says where the next one does."""
    wrap: Wrap
    words: str = ""
    """What an error says after "did not meet stage 1"."""


def join_ring(contract: PodContract, meeting: Meeting) -> tuple[socket.socket, socket.socket]:
    """Connect to the next stage and be connected to by the one before: what to send on, and what to receive from.

    Raises:
        RuntimeFailure: class RendezvousTimeout when one of them did not come in time, or is not taken in.
    """
    deadline = time.monotonic() + contract.config.timeouts.rendezvous_seconds
    with _Entrance(contract, meeting) as entrance:
        next_stage = _connect(contract, meeting, meeting.find_next(entrance.address), deadline)
        try:
            return next_stage, entrance.await_stage(deadline)
        except BaseException:
            next_stage.close()
            raise


def in_clear(connection: socket.socket, *, is_server: bool) -> socket.socket:  # noqa: ARG001 - both ends are alike
    """A `Wrap` of nothing."""
    return connection


def _connect(contract: PodContract, meeting: Meeting, there: tuple[str, int], deadline: float) -> socket.socket:
    """Try until the next stage takes this one in."""
    next_stage = (contract.stage + 1) % contract.stage_count
    reason = "it does not listen"
    while time.monotonic() < deadline:
        try:
            return _enter(contract, meeting, there, next_stage)
        except (LinkRefusedError, OSError) as error:
            reason = _words_of(error)
            time.sleep(_POLL_SECONDS)
    raise _failure(contract, meeting, next_stage, f"{there[0]}:{there[1]} does not take it in: {reason}")


def _enter(contract: PodContract, meeting: Meeting, there: tuple[str, int], next_stage: int) -> socket.socket:
    connection = _wrapped(socket.create_connection(there, timeout=HANDSHAKE_SECONDS), meeting, is_server=False)
    try:
        own = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(own)
        numbers = own + _read(connection, NONCE_BYTES)
        connection.sendall(_proof(contract, contract.stage, next_stage, numbers))
        _check_proof(connection, _proof(contract, next_stage, contract.stage, numbers))
    except BaseException:
        connection.close()
        raise
    return connection


class _Entrance:
    """Listens for the stage before, for as long as the block runs; strangers hold nobody up.

    A block that fails hangs up on the stage that was let in: nobody else would close that connection.
    """

    def __init__(self, contract: PodContract, meeting: Meeting) -> None:
        self._contract = contract
        self._meeting = meeting
        self._before = (contract.stage - 1) % contract.stage_count
        self._changed = threading.Condition()
        self._found: socket.socket | None = None
        self._reason = "nobody came"
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._is_over = False
        host, port = meeting.listen
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            detail = f"can't listen on {host}:{port}: {error.strerror}"
            raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="ring entrance", daemon=True).start()

    def __enter__(self) -> "_Entrance":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_error: object) -> None:
        with self._changed:
            self._is_over = True
            if failure is not None and self._found is not None:
                self._found.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def await_stage(self, deadline: float) -> socket.socket:
        """The connection of the stage before; raises RuntimeFailure."""
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None, max(0.0, deadline - time.monotonic()))
            if self._found is None:
                reason = f"it did not connect: {self._reason}"
                raise _failure(self._contract, self._meeting, self._before, reason)
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
            threading.Thread(target=self._let_in, args=arguments, name="ring handshake", daemon=True).start()

    def _let_in(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            self._take(_wrapped(connection, self._meeting, is_server=True))
        except (LinkRefusedError, OSError) as error:
            with self._changed:
                self._reason = f"{address} was refused: {_words_of(error)}"
        finally:
            self._strangers.release()

    def _take(self, connection: socket.socket) -> None:
        here = self._contract.stage
        try:
            others = _read(connection, NONCE_BYTES)
            own = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(own)
            _check_proof(connection, _proof(self._contract, self._before, here, others + own))
            with self._changed:
                if self._is_over or self._found is not None:
                    raise LinkRefusedError("the stage before is connected already")
                connection.sendall(_proof(self._contract, here, self._before, others + own))
                self._found = connection
                self._changed.notify_all()
        except BaseException:
            connection.close()
            raise


def _wrapped(connection: socket.socket, meeting: Meeting, *, is_server: bool) -> socket.socket:
    """Raises LinkRefusedError or OSError; the connection is then closed."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return meeting.wrap(connection, is_server=is_server)
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


def _words_of(error: LinkRefusedError | OSError) -> str:
    return words_of(error) if isinstance(error, OSError) else str(error)


def _failure(contract: PodContract, meeting: Meeting, peer: int, reason: str) -> RuntimeFailure:
    limit_seconds = contract.config.timeouts.rendezvous_seconds
    detail = f"stage {contract.stage} did not meet stage {peer}{meeting.words} within {limit_seconds:g} s: {reason}"
    return RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="rendezvous", peer=peer)
