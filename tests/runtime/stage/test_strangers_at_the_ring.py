"""Where stages meet, in clear and by TLS: only the stage before gets in, whoever else knocks; tensors go round."""

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trustme

from processes.model_certificates import NAME, write_certificates
from processes.transport_ends import hang_up, join_all, transport_contract
from processes.wire_recorder import recorded_wire
from stageline_api.runtime_config import TlsConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import NONCE_BYTES, link_proof
from stageline_runtime.plan_bus.messages import BusProtocolError, LinkAddress, TransportKind
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, Transport, WireSizes
from stageline_runtime.transport.rendezvous import join
from stageline_runtime.transport.ring import address_of, link_address, listen

HIDDEN_SIZE = 64
SIZES = WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2)
RECORDER = "127.0.0.21"
OTHERS: dict[str, Callable[[PodContract], PodContract]] = {
    "another incarnation": lambda contract: replace(contract, incarnation=2),
    "another group": lambda contract: replace(contract, group=1),
    "another rank": lambda contract: replace(contract, rank=1),
    "another stage": lambda contract: replace(contract, stage=0),
    "another token": lambda contract: replace(contract, bus_token="guessed"),
    "another namespace": lambda contract: replace(
        contract, config=contract.config.model_copy(update={"namespace": "o"})
    ),
}
Connect = Callable[[LinkAddress], socket.socket]


@pytest.fixture(scope="module", params=["in clear", "by TLS"])
def tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TlsConfig | None:
    if request.param == "in clear":
        return None
    return write_certificates(tmp_path_factory.mktemp("certificates"), trustme.CA())


@pytest.fixture
def connect(tls: TlsConfig | None) -> Connect:
    """Opens a connection as a stage does, with the model's certificate where stages show it."""
    if tls is None:
        return lambda address: socket.create_connection(address, timeout=60)
    context = ssl.create_default_context(cafile=Path(tls.directory) / "ca.crt")
    context.load_cert_chain(Path(tls.directory) / "tls.crt", Path(tls.directory) / "tls.key")
    return lambda address: context.wrap_socket(socket.create_connection(address, timeout=60), server_hostname=NAME)


def meet(contract: PodContract, listener: socket.socket, next_address: LinkAddress | None) -> Transport:
    return join(contract, TransportKind.HOST, SIZES, accelerator=None, listener=listener, next_address=next_address)


def test_tensors_go_round_three_stages(tls: TlsConfig | None) -> None:
    contracts = [transport_contract(stage, 60, tls, stage_count=3) for stage in range(3)]
    first, middle, last = join_all(contracts, SIZES)
    for seq in range(40):
        for later in (middle, last):
            later.post_hidden(seq, 3)
        first.post_feedback(seq, 2)
        first.send_hidden(seq, torch.full((3, HIDDEN_SIZE), float(seq)))
        middle.send_hidden(seq, middle.wait_hidden(seq) + 1)
        assert last.wait_hidden(seq).tolist() == [[seq + 1.0] * HIDDEN_SIZE] * 3
        last.send_feedback(seq, torch.full((2, FEEDBACK_WIDTH), seq))
        assert first.wait_feedback(seq).tolist() == [[seq] * FEEDBACK_WIDTH] * 2
    for each in (first, middle, last):
        hang_up(each)


def told(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or what came before the other end hung up."""
    found = b""
    with suppress(ConnectionResetError):
        while len(found) < num_bytes and (part := connection.recv(num_bytes - len(found))):
            found += part
    return found


def test_strangers_get_nothing_and_hold_nobody_up(tls: TlsConfig | None, connect: Connect) -> None:
    """Silent ones, those that speak without the token, and those that say again what they are told. Who listens to
    the wire hears no tensor where stages show certificates."""
    contracts = [transport_contract(stage, 60, tls) for stage in range(2)]
    listeners = [listen(contract) for contract in contracts]
    addresses = [link_address(each) for each in listeners]
    silent = [socket.create_connection(addresses[1], timeout=60) for _ in range(20)]
    recorder = LinkAddress(RECORDER, addresses[1].port)
    with ThreadPoolExecutor(2) as pool, recorded_wire(recorder, addresses[1]) as wire:
        second = pool.submit(meet, contracts[1], listeners[1], addresses[0])
        for words in (b"0" * 64, None):
            with connect(addresses[1]) as stranger:
                stranger.sendall(b"0" * NONCE_BYTES)
                number = told(stranger, NONCE_BYTES)
                assert len(number) == NONCE_BYTES
                stranger.sendall(number.hex().encode() if words is None else words)
                assert told(stranger, 1) == b"", "without the token nothing is opened"
        ends = (meet(contracts[0], listeners[0], recorder), second.result(60))
        hidden = torch.arange(3 * HIDDEN_SIZE, dtype=torch.float32).view(3, HIDDEN_SIZE)
        ends[1].post_hidden(7, 3)
        ends[0].send_hidden(7, hidden)
        assert torch.equal(ends[1].wait_hidden(7), hidden)
        assert len(wire.heard) > hidden.nbytes
        assert (hidden[1].numpy().tobytes()[:32] in bytes(wire.heard)) == (tls is None)
        for end in ends:
            hang_up(end)
    for each in silent:
        each.close()


@pytest.mark.parametrize("case", OTHERS)
def test_a_stage_that_belongs_elsewhere_is_not_met(tls: TlsConfig | None, case: str) -> None:
    """Though it has the address, as if it had been another pod's before, and the model's certificate."""
    own, other = (transport_contract(stage, 60, tls, rendezvous_seconds=2) for stage in (0, 1))
    listeners = [listen(own), listen(other)]
    addresses = [link_address(each) for each in listeners]
    with ThreadPoolExecutor(2) as pool:
        meetings = [
            pool.submit(meet, own, listeners[0], addresses[1]),
            pool.submit(meet, OTHERS[case](other), listeners[1], addresses[0]),
        ]
        words = "" if tls is None else " by TLS"
        for meeting in meetings:
            with pytest.raises(RuntimeFailure, match=f"did not meet stage .{words} within 2 s") as caught:
                meeting.result(60)
            assert caught.value.failure_class == "RendezvousTimeout"
            assert "unused" not in caught.value.detail, "the token"


@pytest.mark.parametrize("answer", ["nothing", "words", "what it was told"])
def test_a_stranger_at_the_next_stages_address_is_not_sent_to(answer: str) -> None:
    """It answers there in the next stage's place, and hears neither token nor tensor."""
    contract = transport_contract(0, 60, rendezvous_seconds=2)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = impostor.accept()
                    with connection, suppress(OSError):
                        number = told(connection, NONCE_BYTES)
                        connection.sendall(b"0" * NONCE_BYTES if answer == "words" else number)
                        proof = told(connection, 64)
                        if answer != "nothing":
                            connection.sendall(b"0" * 64 if answer == "words" else proof)
                            heard.append(number + proof + told(connection, 1))

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(RuntimeFailure, match=r"stage 0 did not meet stage 1 within 2 s: 127.* does not take it in"):
            meet(contract, listen(contract), LinkAddress(*impostor.getsockname()))
        impostor.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert answer == "nothing" or heard
    assert all(len(each) == NONCE_BYTES + 64 and b"unused" not in each for each in heard)


def test_an_engine_that_names_no_next_stage_is_told_so() -> None:
    contract = transport_contract(1, 60)
    with pytest.raises(BusProtocolError, match=r"Welcome\.next_address is missing for stage 1"):
        meet(contract, listen(contract), None)


def test_a_transport_that_a_stage_can_not_have_is_told_to_the_engine() -> None:
    contract = transport_contract(1, 60)
    with pytest.raises(BusProtocolError, match=r"Welcome\.transport is nccl, and stage 1 has no device"):
        join(contract, TransportKind.NCCL, SIZES, accelerator=None, listener=listen(contract), next_address=None)


def test_a_stage_that_gives_up_hangs_up_on_the_one_it_had_let_in(tls: TlsConfig | None, connect: Connect) -> None:
    """The stage before is connected already when this one can't find the next."""
    contract = transport_contract(1, 60, tls, rendezvous_seconds=5)
    life = f"{contract.config.namespace}/{contract.config.model_name}/0/1/0"
    listener = listen(contract)
    address = link_address(listener)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = link_address(gone)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, contract, listener, nobody)
        with connect(address) as connection:
            connection.sendall(b"0" * NONCE_BYTES)
            numbers = b"0" * NONCE_BYTES + told(connection, NONCE_BYTES)
            connection.sendall(link_proof(contract.bus_token, life, numbers, speaker=0, listener=1).encode())
            wanted = link_proof(contract.bus_token, life, numbers, speaker=1, listener=0).encode()
            assert told(connection, len(wanted)) == wanted
            with pytest.raises(RuntimeFailure, match=r"did not meet stage 0.*does not take it in"):
                meeting.result(60)
            with suppress(ssl.SSLError):  # it says no goodbye
                assert told(connection, 1) == b""


def test_a_certificate_that_is_not_accepted_is_named(tmp_path: Path) -> None:
    contracts = [
        transport_contract(stage, 60, write_certificates(tmp_path / str(stage), trustme.CA()), rendezvous_seconds=2)
        for stage in range(2)
    ]
    listeners = [listen(contract) for contract in contracts]
    addresses = [link_address(each) for each in listeners]
    with ThreadPoolExecutor(2) as pool:
        meetings: list[Future[Transport]] = [
            pool.submit(meet, contracts[here], listeners[here], addresses[1 - here]) for here in range(2)
        ]
        for meeting in meetings:
            with pytest.raises(RuntimeFailure, match="its certificate is not accepted"):
                meeting.result(60)


def test_a_peer_that_goes_is_named_at_both_ends(tls: TlsConfig | None) -> None:
    first, second = join_all([transport_contract(stage, 60, tls) for stage in range(2)], SIZES)
    first.post_feedback(0, 1)
    hang_up(second)
    with pytest.raises(PeerLostError, match="stage 1 was lost during receive feedback: the connection is lost"):
        first.wait_feedback(0)
    with pytest.raises(PeerLostError, match="stage 1 was lost during send hidden"):
        send_many(first)
    hang_up(first)


def send_many(transport: Transport) -> None:
    """More than the kernel would keep for a peer that is gone."""
    for seq in range(1000):
        transport.send_hidden(seq, torch.ones(3, HIDDEN_SIZE))


def test_an_interface_is_known_by_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(
        RuntimeFailure, match=r"spec\.network\.interface nope0: this pod has no such interface"
    ) as caught:
        address_of("nope0")
    assert caught.value.failure_class == "BadConfig"
