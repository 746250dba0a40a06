"""Whoever reaches the rendezvous store can list and set its keys; no stage is led to a stranger by that."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from processes.free_ports import free_port
from processes.transport_ends import transport_contract
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.guarded_store import GuardedStore
from stageline_runtime.transport.protocol import Transport, WireSizes
from stageline_runtime.transport.rendezvous import join


def meet(contract: PodContract) -> Transport:
    sizes = WireSizes(hidden_size=8, dtype=torch.float32, max_step_tokens=4, max_rows=2)
    return join(contract, TransportKind.HOST, sizes, accelerator=None)


def stranger_at(port: int) -> Any:
    return TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("forged", [b"", b"an address of somebody else's", None], ids=["nothing", "words", "bent"])
def test_an_address_that_a_stranger_has_set_is_not_gone_to(forged: bytes | None) -> None:
    """Stage 0 has said where it is; somebody says otherwise before stage 1 comes."""
    port = free_port()
    contracts = [transport_contract(stage, port, 60, rendezvous_seconds=10) for stage in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, contracts[0])
        stranger = stranger_at(port)
        deadline = time.monotonic() + 60
        while not (keys := stranger.list_keys()):
            assert time.monotonic() < deadline, "stage 0 says nothing"
            time.sleep(0.01)
        for key in keys:
            said = stranger.get(key)
            stranger.set(key, said[:-1] + bytes([said[-1] ^ 1]) if forged is None else forged)
        with pytest.raises(RuntimeFailure, match="was set by a stranger"):
            meet(contracts[1])
        with pytest.raises(RuntimeFailure):
            first.result(60)


def test_a_code_is_of_one_key_and_one_token() -> None:
    inner: Any = HashStore()  # torch's stubs know strings alone
    own, other = GuardedStore(inner, "token"), GuardedStore(inner, "guessed")
    own.set("a", b"1")
    assert own.get("a") == b"1"
    assert own.check(["a"])
    with pytest.raises(RuntimeError, match="'a' was set by a stranger"):
        other.get("a")
    inner.set("b", inner.get("a"))
    with pytest.raises(RuntimeError, match="'b' was set by a stranger"):
        own.get("b")
