"""Tensors of a device cross through pinned memory, and the other end may be a CPU's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from oracles.simulated_accelerator import ImmediateAccelerator
from processes.transport_ends import hang_up, join_all, transport_contract
from stageline_runtime.accelerator.protocol import Event
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, Transport, WireSizes
from stageline_runtime.transport.socket_transport import SEND_RING, SocketTransport, StagedTransport

HIDDEN_SIZE = 3
NUM_PLANS = 12 * SEND_RING


KINDS = ("both staged", "the last is a CPU", "the first is a CPU")


@contextmanager
def two_ends(kind: str, step_seconds: float = 60.0) -> Iterator[tuple[Transport, Transport]]:
    is_cpu = {"both staged": None, "the first is a CPU": 0, "the last is a CPU": 1}[kind]
    first, last = join_all(
        [transport_contract(stage, step_seconds) for stage in (0, 1)],
        WireSizes(hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=4, max_rows=2),
        TransportKind.STAGED,
        [None if stage == is_cpu else ImmediateAccelerator() for stage in (0, 1)],
    )
    kinds = [SocketTransport if stage == is_cpu else StagedTransport for stage in (0, 1)]
    assert [type(first), type(last)] == kinds
    yield first, last
    hang_up(first)
    hang_up(last)


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_arrives_although_the_sender_reuses_its_tensor(kind: str) -> None:
    with two_ends(kind) as (first, last):
        send_every_plan(first, last)


def send_every_plan(first: Transport, last: Transport) -> None:
    output, rows = torch.zeros(4, HIDDEN_SIZE), torch.zeros(2, FEEDBACK_WIDTH, dtype=torch.int64)
    for seq in range(NUM_PLANS):
        num_tokens = 1 + seq % 4
        last.post_hidden(seq, num_tokens)
        first.post_feedback(seq, 2)
        first.send_hidden(seq, output.fill_(seq)[:num_tokens].clone())
        assert last.wait_hidden(seq).tolist() == [[float(seq)] * HIDDEN_SIZE] * num_tokens
        last.send_feedback(seq, rows.fill_(seq).clone())
        assert first.wait_feedback(seq).tolist() == [[seq] * FEEDBACK_WIDTH] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_stage_can_ask_whether_a_tensor_has_come(kind: str) -> None:
    with two_ends(kind) as (first, last):
        last.post_hidden(0, 1)
        assert not last.hidden_has_come(0)
        first.send_hidden(0, torch.ones(1, HIDDEN_SIZE))
        deadline = time.monotonic() + 60
        while not last.hidden_has_come(0):
            assert time.monotonic() < deadline, "nothing has come"
            time.sleep(0.001)
        assert last.wait_hidden(0).tolist() == [[1.0] * HIDDEN_SIZE]


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_left_is_told_by_a_later_call(kind: str) -> None:
    """The sending thread meets the error; the stage's thread raises it. The limit of a step is what ends the wait."""
    with two_ends(kind, step_seconds=3.0) as (first, last):
        hang_up(last)
        with pytest.raises(PeerLostError) as lost:  # noqa: PT012 - which call it is depends on the thread
            for seq in range(100):
                first.send_hidden(seq, torch.zeros(1, HIDDEN_SIZE))
    assert lost.value.peer == 1


class _SlowCopies(ImmediateAccelerator):
    """A copy arrives only when its event is waited for, and until then the buffer holds nonsense."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.main = self  # type: ignore[assignment]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(-1)
        self.pending.append((target, source.clone()))

    def record(self, *, timed: bool = False) -> Event:  # noqa: ARG002 - the protocol's
        return _Arrival(*self.pending.pop())


class _Arrival:
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._target.copy_(self._source)

    def seconds_since(self, earlier: Event) -> float:
        raise AssertionError(earlier)


class _Recorder:
    """A wire that notes what it is given to send."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def __getattr__(self, name: str) -> object:
        return lambda seq, tensor: self.sent.append([float(seq), *tensor.flatten().tolist()])


def test_nothing_is_sent_before_its_copy_is_there() -> None:
    wire = _Recorder()
    transport = StagedTransport(
        wire,  # type: ignore[arg-type]
        _SlowCopies(),
        WireSizes(hidden_size=1, dtype=torch.float32, max_step_tokens=1, max_rows=1),
    )
    for seq in range(20):
        transport.send_hidden(seq, torch.full((1, 1), float(seq)))
    deadline = time.monotonic() + 60
    while len(wire.sent) < 20:
        assert time.monotonic() < deadline, f"only {len(wire.sent)} tensors were sent"
        time.sleep(0.001)
    assert wire.sent == [[float(seq)] * 2 for seq in range(20)]
