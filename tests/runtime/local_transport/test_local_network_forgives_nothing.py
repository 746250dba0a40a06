"""What a lucky network would let pass is an error on the local one, and what is allowed arrives whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chaos.interleaving import DeadlockError, Interleaving
from chaos.local_transport import NONSENSE, LocalNetwork, WireError
from stageline_runtime.transport.protocol import LoopbackTransport, Transport
from stageline_runtime.transport.socket_link import RECEIVE_RING
from stageline_runtime.transport.socket_transport import SEND_RING

Body = Callable[[Transport], None]


def run_two_stages(first: Body, second: Body, seed: int = 0) -> LocalNetwork:
    """Run a body on each of two stages whose hidden size is 2."""
    interleaving = Interleaving(seed)
    network = LocalNetwork(interleaving)

    def add(stage: int, body: Body) -> None:
        transport = network.transport(stage, 2, hidden_size=2, dtype=torch.int64)
        interleaving.add_task(f"stage {stage}", lambda: body(transport))

    add(0, first)
    add(1, second)
    interleaving.run()
    return network


def hidden(seq: int) -> Tensor:
    return torch.tensor([[seq, seq + 1]])


def nothing(_transport: Transport) -> None:
    """A stage that ends at once."""


@pytest.mark.parametrize("seed", range(20))
def test_tensors_of_many_plans_reach_their_own_receives(seed: int) -> None:
    plans = range(3 * SEND_RING)

    def send(transport: Transport) -> None:
        for seq in plans:
            transport.send_hidden(seq, hidden(seq))

    def receive(transport: Transport) -> None:
        for seq in plans:
            transport.post_hidden(seq, 1)
        for seq in plans:
            assert torch.equal(transport.wait_hidden(seq), hidden(seq))

    network = run_two_stages(send, receive, seed)
    assert network.outstanding() == []
    assert [posting.seq for posting in network.postings] == list(plans)


def test_a_full_ring_waits_until_the_oldest_send_is_complete() -> None:
    def send(transport: Transport) -> None:
        for seq in range(SEND_RING + 1):
            assert transport.would_block() == (seq == SEND_RING)
            transport.send_hidden(seq, hidden(seq))

    message = "stage 0: waits for plan 0, sends hidden from stage 0 to stage 1\nstage 1: ended"
    with pytest.raises(DeadlockError, match=message):
        run_two_stages(send, nothing)


def test_a_stage_that_waits_for_nothing_is_named() -> None:
    def wait(transport: Transport) -> None:
        transport.post_feedback(3, 2)
        transport.wait_feedback(3)

    with pytest.raises(DeadlockError, match="stage 0: waits for plan 3, receives feedback from stage 1 to stage 0"):
        run_two_stages(wait, nothing)


def test_a_tensor_written_to_before_its_send_is_complete() -> None:
    def overwrite(transport: Transport) -> None:
        tensor = hidden(0)
        transport.send_hidden(0, tensor)
        tensor.zero_()

    def receive(transport: Transport) -> None:
        transport.post_hidden(0, 1)
        transport.wait_hidden(0)

    with pytest.raises(WireError, match="plan 0: hidden from stage 0 to stage 1: the tensor was written to"):
        run_two_stages(overwrite, receive)


@pytest.mark.parametrize("seed", range(4))
def test_ends_that_disagree_about_the_shape(seed: int) -> None:
    def receive(transport: Transport) -> None:
        transport.post_hidden(0, 3)
        transport.wait_hidden(0)

    with pytest.raises(WireError, match=r"of shape \(1, 2\) is sent, plan 0, torch.int64 of shape \(3, 2\) expected"):
        run_two_stages(lambda transport: transport.send_hidden(0, hidden(0)), receive, seed)


def test_a_received_tensor_is_good_until_the_ring_is_through() -> None:
    plans = range(RECEIVE_RING + 1)

    def send(transport: Transport) -> None:
        for seq in plans:
            transport.send_hidden(seq, hidden(seq))

    def receive(transport: Transport) -> None:
        for seq in plans:
            transport.post_hidden(seq, 1)
        received = [transport.wait_hidden(seq) for seq in plans]
        assert (received[0] == NONSENSE).all()
        assert all(torch.equal(received[seq], hidden(seq)) for seq in plans[1:])

    run_two_stages(send, receive)


def test_a_plan_posted_twice() -> None:
    def post_twice(transport: Transport) -> None:
        transport.post_hidden(5, 1)
        transport.post_hidden(5, 1)

    with pytest.raises(WireError, match="plan 5: hidden from stage 0 to stage 1 is posted twice by its receiver"):
        run_two_stages(nothing, post_twice)


def test_what_was_never_matched_is_outstanding() -> None:
    network = run_two_stages(nothing, lambda transport: transport.post_hidden(7, 1))
    assert network.outstanding() == ["plan 7: hidden from stage 0 to stage 1"]


def test_a_single_stage_needs_no_network() -> None:
    transport = LocalNetwork(Interleaving(0)).transport(0, 1, hidden_size=2, dtype=torch.int64)
    assert isinstance(transport, LoopbackTransport)
