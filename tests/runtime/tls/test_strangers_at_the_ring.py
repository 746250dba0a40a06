"""Where stages meet by TLS: only the stage before gets in, whoever else knocks, and nothing crosses in clear."""

import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import trustme

from processes.free_ports import free_port
from processes.model_certificates import NAME, write_certificates
from processes.transport_ends import secure_address, transport_contract
from processes.wire_recorder import recorded_wire
from stageline_api.runtime_config import TlsConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import NONCE_BYTES
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.point_to_point import PointToPointTransport
from stageline_runtime.transport.protocol import PeerLostError, WireSizes
from stageline_runtime.transport.rendezvous import join
from stageline_runtime.transport.ring import HANDSHAKE_SECONDS

HIDDEN_SIZE = 64
RECORDER = "127.0.0.21"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return write_certificates(tmp_path_factory.mktemp("certificates"), trustme.CA())


def meet(contract: PodContract, next_address: str) -> PointToPointTransport:
    sizes = WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2)
    transport = join(contract, TransportKind.HOST, sizes, accelerator=None, next_address=next_address)
    assert isinstance(transport, PointToPointTransport)
    return transport


def until_it_listens(port: int, stage: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError), socket.create_connection((secure_address(stage), port), timeout=60):
            return
        assert time.monotonic() < deadline, "nobody listens"
        time.sleep(0.01)


def test_whoever_listens_hears_no_hidden_tensor_and_strangers_hold_nobody_up(tls: TlsConfig) -> None:
    """Stage 1 is reached through a recorder; strangers came before: silent ones, and one with the certificate alone."""
    port = free_port()
    contracts = [transport_contract(stage, port, 60, tls) for stage in range(2)]
    with (
        ThreadPoolExecutor(2) as pool,
        recorded_wire((RECORDER, port), (secure_address(1), port)) as wire,
    ):
        began = time.monotonic()
        second = pool.submit(meet, contracts[1], secure_address(0))
        until_it_listens(port, 1)
        silent = [socket.create_connection((secure_address(1), port), timeout=60) for _ in range(20)]
        context = ssl.create_default_context(cafile=Path(tls.directory) / "ca.crt")
        context.load_cert_chain(Path(tls.directory) / "tls.crt", Path(tls.directory) / "tls.key")
        with (
            socket.create_connection((secure_address(1), port), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname=NAME) as without_token,
        ):
            without_token.sendall(b"0" * (NONCE_BYTES + 64))
            heard = b"".join(iter(lambda: without_token.recv(1024), b""))
            assert len(heard) == NONCE_BYTES, "the certificate without the token opens nothing"
        first = pool.submit(meet, contracts[0], RECORDER)
        ends = (first.result(60), second.result(60))
        assert time.monotonic() - began < HANDSHAKE_SECONDS + 50
        hidden = torch.arange(3 * HIDDEN_SIZE, dtype=torch.float32).view(3, HIDDEN_SIZE)
        ends[1].post_hidden(7, 3)
        ends[0].send_hidden(7, hidden)
        assert torch.equal(ends[1].wait_hidden(7), hidden)
        assert len(wire.heard) > hidden.nbytes
        assert hidden[1].numpy().tobytes()[:32] not in bytes(wire.heard)
        for each in silent:
            each.close()
        for end in ends:
            end.close()


OTHERS: dict[str, Callable[[PodContract], PodContract]] = {
    "another incarnation": lambda contract: changed(contract, incarnation=2),
    "another group": lambda contract: changed(contract, group=1),
    "another token": lambda contract: changed(contract, bus_token="guessed"),
}


def changed(contract: PodContract, **fields: object) -> PodContract:
    return PodContract(**{**{name: getattr(contract, name) for name in PodContract.__slots__}, **fields})


@pytest.mark.parametrize("case", OTHERS)
def test_a_stage_that_belongs_elsewhere_is_not_met(tls: TlsConfig, case: str) -> None:
    """It has the model's certificate all the same."""
    port = free_port()
    own, other = (transport_contract(stage, port, 60, tls, rendezvous_seconds=2) for stage in range(2))
    with ThreadPoolExecutor(2) as pool:
        meetings: list[Future[PointToPointTransport]] = [
            pool.submit(meet, own, secure_address(1)),
            pool.submit(meet, OTHERS[case](other), secure_address(0)),
        ]
        for meeting in meetings:
            with pytest.raises(RuntimeFailure, match=r"did not meet stage . by TLS within 2 s") as caught:
                meeting.result(60)
            assert caught.value.failure_class == "RendezvousTimeout"
            assert "unused" not in caught.value.detail, "the token"


def test_a_certificate_that_is_not_accepted_is_named(tls: TlsConfig, tmp_path: Path) -> None:
    port = free_port()
    own = transport_contract(0, port, 60, tls, rendezvous_seconds=2)
    other = transport_contract(1, port, 60, write_certificates(tmp_path, trustme.CA()), rendezvous_seconds=2)
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(meet, own, secure_address(1)), pool.submit(meet, other, secure_address(0))]
        for meeting in meetings:
            with pytest.raises(RuntimeFailure, match="its certificate is not accepted"):
                meeting.result(60)


def test_a_peer_that_goes_is_named_at_both_ends(tls: TlsConfig) -> None:
    port = free_port()
    contracts = [transport_contract(stage, port, 60, tls) for stage in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, contracts, (secure_address(1), secure_address(0)))
        first.post_feedback(0, 1)
        second.close()
        with pytest.raises(PeerLostError, match="stage 1 was lost during receive feedback: the connection is lost"):
            first.wait_feedback(0)
        with pytest.raises(PeerLostError, match="stage 1 was lost during send hidden"):
            send_many(first)
        first.close()


def send_many(transport: PointToPointTransport) -> None:
    """More than the kernel would keep for a peer that is gone."""
    for seq in range(1000):
        transport.send_hidden(seq, torch.ones(3, HIDDEN_SIZE))
