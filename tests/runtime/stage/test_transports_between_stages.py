"""Two real ends that met: tensors arrive, rings stay bounded, a silent peer is named. By gloo, and by TLS."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import trustme

from processes.free_ports import free_port
from processes.model_certificates import write_certificates
from processes.transport_ends import secure_address, transport_contract
from stageline_api.runtime_config import TlsConfig
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.transport.point_to_point import FEEDBACK_RING, MAX_TAG, SEND_RING, PointToPointTransport
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes
from stageline_runtime.transport.rendezvous import join

HIDDEN_SIZE = 8


@contextmanager
def met(
    step_seconds: float, tls: TlsConfig | None = None
) -> Iterator[tuple[PointToPointTransport, PointToPointTransport]]:
    """Transports of stage 0 and stage 1 that wait for each other at most `step_seconds`."""
    port = free_port()

    def meet(stage: int) -> PointToPointTransport:
        transport = join(
            transport_contract(stage, port, step_seconds, tls),
            TransportKind.GLOO,
            WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2),
            accelerator=None,
            next_address=secure_address(1 - stage),
        )
        assert isinstance(transport, PointToPointTransport)
        return transport

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, (0, 1))
    yield first, second
    first.close()
    second.close()


@pytest.fixture(scope="module", params=["by gloo", "by TLS"])
def tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TlsConfig | None:
    if request.param == "by gloo":
        return None
    return write_certificates(tmp_path_factory.mktemp("certificates"), trustme.CA())


@pytest.fixture(scope="module")
def ends(tls: TlsConfig | None) -> Iterator[tuple[PointToPointTransport, PointToPointTransport]]:
    with met(step_seconds=60, tls=tls) as both:
        yield both


def hidden(seq: int) -> torch.Tensor:
    return torch.full((3, HIDDEN_SIZE), float(seq))


def test_many_plans_cross_and_nothing_piles_up(ends: tuple[PointToPointTransport, PointToPointTransport]) -> None:
    """Far more plans than the rings hold; feedback is sent for each and both sides keep only what is under way."""
    first, second = ends
    for seq in range(5 * FEEDBACK_RING):
        second.post_hidden(seq, 3)
        first.post_feedback(seq, 2)
        first.send_hidden(seq, hidden(seq))
        assert torch.equal(second.wait_hidden(seq), hidden(seq))
        rows = torch.tensor([[seq, 1, 0, 7], [seq, 1, 0, 9]])
        second.send_feedback(seq, rows)
        assert len(first._hidden_sends) <= SEND_RING
        assert len(second._feedback_sends) <= FEEDBACK_RING
        assert torch.equal(first.wait_feedback(seq), rows)


def test_plans_may_be_posted_ahead(ends: tuple[PointToPointTransport, PointToPointTransport]) -> None:
    first, second = ends
    sequence = range(1000, 1000 + SEND_RING)
    for seq in sequence:
        second.post_hidden(seq, 3)
    for seq in sequence:
        first.send_hidden(seq, hidden(seq))
    for seq in sequence:
        assert torch.equal(second.wait_hidden(seq), hidden(seq))


def test_sequence_numbers_outgrow_32_bits(ends: tuple[PointToPointTransport, PointToPointTransport]) -> None:
    first, second = ends
    for seq in (MAX_TAG - 1, MAX_TAG, 2**31, 2**32 + 5, 2**40):
        second.post_hidden(seq, 3)
        first.post_feedback(seq, 1)
        first.send_hidden(seq, hidden(seq % 97))
        assert torch.equal(second.wait_hidden(seq), hidden(seq % 97))
        second.send_feedback(seq, torch.ones(1, FEEDBACK_WIDTH, dtype=torch.int64))
        first.wait_feedback(seq)


def test_a_silent_peer_is_named_with_plan_and_operation(tls: TlsConfig | None) -> None:
    """Between ends of its own: gloo gives up the connection once a wait timed out."""
    with met(step_seconds=1, tls=tls) as (_, second):
        second.post_hidden(2000, 3)
        with pytest.raises(PeerLostError, match="plan 2000: stage 0 did not answer during receive hidden") as caught:
            second.wait_hidden(2000)
    assert (caught.value.peer, caught.value.seq, caught.value.timed_out) == (0, 2000, True)
