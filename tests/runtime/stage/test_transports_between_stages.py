"""Two real ends that met: tensors arrive, rings stay bounded, a silent peer is named. By each kind of connection."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import trustme

from processes.model_certificates import write_certificates
from processes.transport_ends import hang_up, join_all, transport_contract
from stageline_api.runtime_config import TlsConfig
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, Transport, WireSizes
from stageline_runtime.transport.socket_transport import MAX_TAG, SEND_RING, SocketTransport

HIDDEN_SIZE = 8


@dataclass(frozen=True)
class Kind:
    """Of connection."""

    tls: TlsConfig | None = None


@contextmanager
def met(step_seconds: float, kind: Kind) -> Iterator[tuple[Transport, Transport]]:
    """Transports of stage 0 and stage 1 that wait for each other at most `step_seconds`."""
    sizes = WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2)
    first, second = join_all([transport_contract(stage, step_seconds, kind.tls) for stage in (0, 1)], sizes)
    yield first, second
    hang_up(first)
    hang_up(second)


def test_whether_a_tensor_has_come_can_be_asked_before_it_is_waited_for(kind: Kind) -> None:
    """Of plans that were posted ahead the next one's; the end of the other stage is something too."""
    with met(60, kind) as (first, second):
        for seq in range(2):
            second.post_hidden(seq, 1)
            assert not second.hidden_has_come(0)
        for seq in range(2):
            first.send_hidden(seq, torch.full((1, HIDDEN_SIZE), float(seq)))
            await_arrival(second, seq)
            assert second.wait_hidden(seq).tolist() == [[float(seq)] * HIDDEN_SIZE]
        second.post_hidden(2, 1)
        assert not second.hidden_has_come(2)
        hang_up(first)
        await_arrival(second, 2)
        with pytest.raises(PeerLostError):
            second.wait_hidden(2)


def await_arrival(transport: Transport, seq: int) -> None:
    deadline = time.monotonic() + 60
    while not transport.hidden_has_come(seq):
        assert time.monotonic() < deadline, f"nothing of plan {seq} has come"
        time.sleep(0.001)


@pytest.fixture(scope="module", params=["in clear", "by TLS"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "by TLS":
        return Kind(tls=write_certificates(tmp_path_factory.mktemp("certificates"), trustme.CA()))
    return Kind()


@pytest.fixture(scope="module")
def ends(kind: Kind) -> Iterator[tuple[Transport, Transport]]:
    with met(step_seconds=60, kind=kind) as both:
        yield both


def hidden(seq: int) -> torch.Tensor:
    return torch.full((3, HIDDEN_SIZE), float(seq))


def test_many_plans_cross_and_nothing_piles_up(ends: tuple[Transport, Transport]) -> None:
    """Far more plans than the rings hold; feedback is sent for each and both sides keep only what is under way."""
    first, second = ends
    for seq in range(20 * SEND_RING):
        second.post_hidden(seq, 3)
        first.post_feedback(seq, 2)
        first.send_hidden(seq, hidden(seq))
        assert torch.equal(second.wait_hidden(seq), hidden(seq))
        rows = torch.tensor([[seq], [9]])
        second.send_feedback(seq, rows)
        for each in ends:
            assert isinstance(each, SocketTransport)
            assert each._after.outstanding() <= SEND_RING
        assert torch.equal(first.wait_feedback(seq), rows)


def test_plans_may_be_posted_ahead(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    sequence = range(1000, 1000 + SEND_RING)
    for seq in sequence:
        second.post_hidden(seq, 3)
    for seq in sequence:
        first.send_hidden(seq, hidden(seq))
    for seq in sequence:
        assert torch.equal(second.wait_hidden(seq), hidden(seq))


def test_sequence_numbers_outgrow_32_bits(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    for seq in (MAX_TAG - 1, MAX_TAG, 2**31, 2**32 + 5, 2**40):
        second.post_hidden(seq, 3)
        first.post_feedback(seq, 1)
        first.send_hidden(seq, hidden(seq % 97))
        assert torch.equal(second.wait_hidden(seq), hidden(seq % 97))
        second.send_feedback(seq, torch.ones(1, FEEDBACK_WIDTH, dtype=torch.int64))
        first.wait_feedback(seq)


LONG_PROMPT = 1 << 20
"""Tokens of which no kernel keeps the tensors for a peer that doesn't read."""


def test_long_prompts_wait_for_the_peer_and_the_stage_does_not(
    ends: tuple[Transport, Transport],
) -> None:
    """As many as may be outstanding are handed over at once, and what comes after them doesn't overtake them."""
    first, second = ends
    sizes = [LONG_PROMPT, 3, LONG_PROMPT, 3]
    assert len(sizes) == SEND_RING
    for offset, size in enumerate(sizes):
        first.send_hidden(3000 + offset, torch.full((size, HIDDEN_SIZE), float(offset)))
    for offset, size in enumerate(sizes):
        second.post_hidden(3000 + offset, size)
    for offset, size in enumerate(sizes):
        came = second.wait_hidden(3000 + offset)
        assert (came.shape, bool((came == offset).all())) == ((size, HIDDEN_SIZE), True)
    second.post_hidden(3004, 3)
    first.send_hidden(3004, hidden(4))
    assert torch.equal(second.wait_hidden(3004), hidden(4))


def test_a_silent_peer_is_named_with_plan_and_operation(kind: Kind) -> None:
    with met(step_seconds=1, kind=kind) as (_, second):
        second.post_hidden(2000, 3)
        with pytest.raises(PeerLostError, match="plan 2000: stage 0 did not answer during receive hidden") as caught:
            second.wait_hidden(2000)
    assert (caught.value.peer, caught.value.seq, caught.value.timed_out) == (0, 2000, True)


def test_a_peer_that_goes_is_named_by_who_waits_for_it(kind: Kind) -> None:
    with met(step_seconds=60, kind=kind) as (first, second):
        second.post_hidden(0, 3)
        threading.Timer(0.2, hang_up, [first]).start()
        with pytest.raises(PeerLostError, match="plan 0: stage 0 was lost during receive hidden") as caught:
            second.wait_hidden(0)
    assert (caught.value.peer, caught.value.timed_out) == (0, False)


def test_a_peer_that_goes_is_named_by_who_has_much_to_send(kind: Kind) -> None:
    """What it took of a long prompt is not what it was sent."""
    with met(step_seconds=60, kind=kind) as (first, second):
        first.send_hidden(0, torch.zeros(LONG_PROMPT, HIDDEN_SIZE))
        hang_up(second)
        with pytest.raises(PeerLostError, match="stage 1 was lost during send hidden") as caught:  # noqa: PT012
            for seq in range(1, 1 + 2 * SEND_RING):
                first.send_hidden(seq, hidden(seq))
    assert (caught.value.peer, caught.value.timed_out) == (1, False)
