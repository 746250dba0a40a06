"""Where stages meet in clear: only the stage before gets in, whoever else knocks; middle stages pass tensors on."""

import hashlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from processes.free_ports import free_port
from processes.transport_ends import transport_contract
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.challenge import NONCE_BYTES, link_proof
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.plain_ring import address_of
from stageline_runtime.transport.protocol import Transport, WireSizes
from stageline_runtime.transport.rendezvous import join
from stageline_runtime.transport.ring import Meeting, in_clear, join_ring

HIDDEN_SIZE = 8
SIZES = WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2)
OTHERS: dict[str, Callable[[PodContract], PodContract]] = {
    "another incarnation": lambda contract: replace(contract, incarnation=2),
    "another group": lambda contract: replace(contract, group=1),
    "another rank": lambda contract: replace(contract, rank=1),
    "another stage": lambda contract: replace(contract, stage=0),
    "another token": lambda contract: replace(contract, bus_token="guessed"),
}


def meet(contract: PodContract) -> Transport:
    return join(contract, TransportKind.HOST, SIZES, accelerator=None)


def told_address(port: int) -> tuple[str, int]:
    """Where a stage says that it listens, read by somebody who may list the store."""
    store: Any = TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    deadline = time.monotonic() + 60
    while not (keys := store.list_keys()):
        assert time.monotonic() < deadline, "stage 0 says nothing"
        time.sleep(0.01)
    host, number = store.get(keys[0])[hashlib.sha256().digest_size :].decode().split()
    return host, int(number)


def test_tensors_go_round_three_stages() -> None:
    port = free_port()
    contracts = [transport_contract(stage, port, 60, stage_count=3) for stage in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first, middle, last = pool.map(meet, contracts)
    for seq in range(40):
        for later in (middle, last):
            later.post_hidden(seq, 3)
        first.post_feedback(seq, 2)
        first.send_hidden(seq, torch.full((3, HIDDEN_SIZE), float(seq)))
        middle.send_hidden(seq, middle.wait_hidden(seq) + 1)
        assert last.wait_hidden(seq).tolist() == [[seq + 1.0] * HIDDEN_SIZE] * 3
        last.send_feedback(seq, torch.full((2, 4), seq))
        assert first.wait_feedback(seq).tolist() == [[seq] * 4] * 2
    for each in (first, middle, last):
        each.close()


def test_strangers_get_nothing_and_hold_nobody_up() -> None:
    """Silent ones, one that speaks without the token, and one that says again what it is told."""
    port = free_port()
    contracts = [transport_contract(stage, port, 60) for stage in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, contracts[0])
        address = told_address(port)
        silent = [socket.create_connection(address, timeout=60) for _ in range(20)]
        for words in (b"0" * 64, None):
            with socket.create_connection(address, timeout=60) as stranger:
                stranger.sendall(b"0" * NONCE_BYTES)
                told = stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
                assert len(told) == NONCE_BYTES
                stranger.sendall(told.hex().encode() if words is None else words)
                assert stranger.recv(1) == b"", "without the token nothing is opened"
        second = meet(contracts[1])
        second.post_hidden(0, 1)
        first.result(60).send_hidden(0, torch.ones(1, HIDDEN_SIZE))
        assert second.wait_hidden(0).tolist() == [[1.0] * HIDDEN_SIZE]
    for each in silent:
        each.close()
    for end in (first.result(), second):
        end.close()


@pytest.mark.parametrize("case", OTHERS)
def test_a_stage_that_belongs_elsewhere_is_not_met(case: str) -> None:
    """Though it has the address, as if it had been another pod's before."""
    own, other = (transport_contract(stage, 0, 60, rendezvous_seconds=2) for stage in (0, 1))
    ports = {own.stage: free_port(), other.stage: free_port()}

    def enter(contract: PodContract, here: int, there: int) -> None:
        meeting = Meeting(
            listen=("127.0.0.1", ports[here]), find_next=lambda _own: ("127.0.0.1", ports[there]), wrap=in_clear
        )
        join_ring(contract, meeting)

    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(enter, own, 0, 1), pool.submit(enter, OTHERS[case](other), 1, 0)]
        for meeting in meetings:
            with pytest.raises(RuntimeFailure, match=r"did not meet stage . within 2 s") as caught:
                meeting.result(60)
            assert caught.value.failure_class == "RendezvousTimeout"
            assert "unused" not in caught.value.detail, "the token"


def test_a_stage_that_gives_up_hangs_up_on_the_one_it_had_let_in() -> None:
    """The stage before is connected already when this one can't find the next."""
    contract = transport_contract(1, 0, 60)
    life = f"{contract.config.namespace}/{contract.config.model_name}/0/1/0"
    connections: list[socket.socket] = []

    def be_let_in_then_fail(own: tuple[str, int]) -> tuple[str, int]:
        connection = socket.create_connection(own, timeout=60)
        connections.append(connection)
        connection.sendall(b"0" * NONCE_BYTES)
        numbers = b"0" * NONCE_BYTES + connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
        connection.sendall(link_proof(contract.bus_token, life, numbers, speaker=0, listener=1).encode())
        wanted = link_proof(contract.bus_token, life, numbers, speaker=1, listener=0).encode()
        assert connection.recv(len(wanted), socket.MSG_WAITALL) == wanted
        raise RuntimeError("a stranger has set where stage 0 is")

    with pytest.raises(RuntimeError, match="a stranger has set"):
        join_ring(contract, Meeting(listen=("127.0.0.1", 0), find_next=be_let_in_then_fail, wrap=in_clear))
    with connections[0] as connection:
        assert connection.recv(1) == b""


def test_an_interface_is_known_by_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(
        RuntimeFailure, match=r"spec\.network\.interface nope0: this pod has no such interface"
    ) as caught:
        address_of("nope0")
    assert caught.value.failure_class == "BadConfig"
