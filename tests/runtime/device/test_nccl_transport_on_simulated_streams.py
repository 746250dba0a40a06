"""The NCCL transport's waits, on streams whose work runs in a drawn order: every tensor arrives as it was sent.

Two stages share one simulated machine; a link moves a tensor when both ends' streams have come to it. A ring slot
written too early, a receive posted where it isn't awaited or a read before the receive gives a wrong number or a
standstill under some seed. What NCCL itself does on a GPU is `make gpu-check`'s to show.
"""

from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated_accelerator import SimulatedAccelerator, SimulatedStream
from stageline_runtime.transport.nccl import HIDDEN_RING, NcclTransport
from stageline_runtime.transport.protocol import PeerLostError, WireSizes

NUM_PLANS = 3 * HIDDEN_RING
HIDDEN_SIZE = 2
MAX_TOKENS, MAX_ROWS = 4, 3


class SimulatedLink:
    """A communicator of two ranks."""

    def __init__(self, devices: tuple[SimulatedAccelerator, SimulatedAccelerator]) -> None:
        self._devices = devices
        self.sent: deque[torch.Tensor] = deque()
        self.failure: str | None = None
        self.aborted = False

    def of(self, stage: int) -> "SimulatedEnd":
        return SimulatedEnd(self, self._devices[stage])


class SimulatedEnd:
    """One rank. What it queues on its active stream waits for the peer, as NCCL's kernels do."""

    def __init__(self, link: SimulatedLink, device: SimulatedAccelerator) -> None:
        self._link = link
        self._device = device

    def send(self, tensor: torch.Tensor) -> None:
        """The buffer has to stay as it is until the peer has taken it."""
        stream, sent = self._device.current, self._link.sent
        stream.queue(lambda: sent.append(tensor))
        stream.tasks.append(lambda: not any(waiting is tensor for waiting in sent))

    def receive(self, tensor: torch.Tensor) -> None:
        def take() -> bool:
            if self._link.sent:
                tensor.copy_(self._link.sent[0])
                self._link.sent.popleft()
                return True
            return False

        self._device.current.tasks.append(take)

    def error(self) -> str | None:
        return self._link.failure

    def abort(self) -> None:
        self._link.aborted = True


class Pair:
    """A first and a last stage on one machine."""

    def __init__(self, seed: int) -> None:
        first = SimulatedAccelerator(seed)
        self.devices = (first, SimulatedAccelerator(seed + 1, beside=first))
        self.hidden, self.feedback = SimulatedLink(self.devices), SimulatedLink(self.devices)
        self.first, self.last = (self._transport(stage) for stage in (0, 1))

    def _transport(self, stage: int) -> NcclTransport:
        return NcclTransport(
            self.devices[stage],
            before=self.hidden.of(1) if stage == 1 else None,
            after=self.hidden.of(0) if stage == 0 else None,
            feedback=self.feedback.of(stage),
            stage=stage,
            stage_count=2,
            sizes=WireSizes(
                hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=MAX_TOKENS, max_rows=MAX_ROWS
            ),
        )

    def compute(self, stage: int, work: Callable[[], object]) -> None:
        cast(SimulatedStream, self.devices[stage].main).queue(work)


def tokens_of(seq: int) -> int:
    return 1 + seq % MAX_TOKENS


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_hidden_tensors_arrive_whole_and_in_order(seed: int) -> None:
    """The sender reuses one output tensor, as a captured graph does; the receiver reads late."""
    pair = Pair(seed)
    output = torch.zeros(MAX_TOKENS, HIDDEN_SIZE)
    seen: list[tuple[int, list[float]]] = []
    for seq in range(NUM_PLANS):
        pair.last.post_hidden(seq, tokens_of(seq))
    for seq in range(NUM_PLANS):
        pair.compute(0, lambda seq=seq: output.fill_(seq + 1))  # type: ignore[misc]
        pair.first.send_hidden(seq, output[: tokens_of(seq)])
        arrived = pair.last.wait_hidden(seq)
        pair.compute(1, lambda seq=seq, arrived=arrived: seen.append((seq, arrived.flatten().tolist())))  # type: ignore[misc]
        pair.devices[0].run_some()
    pair.devices[0].synchronize()
    assert seen == [(seq, [seq + 1.0] * (tokens_of(seq) * HIDDEN_SIZE)) for seq in range(NUM_PLANS)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_feedback_arrives_beside_hidden_tensors(seed: int) -> None:
    pair = Pair(seed)
    rows = torch.zeros(MAX_ROWS, 3, dtype=torch.int64)
    seen: list[list[int]] = []
    for seq in range(NUM_PLANS):
        pair.first.post_feedback(seq, MAX_ROWS)
        pair.compute(1, lambda seq=seq: rows.fill_(seq))  # type: ignore[misc]
        pair.last.send_feedback(seq, rows)
        pair.last.post_hidden(seq, 1)
        pair.first.send_hidden(seq, torch.full((1, HIDDEN_SIZE), float(seq)))
        pair.last.wait_hidden(seq)
        taken = pair.first.wait_feedback(seq)
        pair.compute(0, lambda taken=taken: seen.append(taken[:, 0].tolist()))  # type: ignore[misc]
    pair.devices[0].synchronize()
    assert seen == [[seq] * MAX_ROWS for seq in range(NUM_PLANS)]


def test_nothing_is_posted_before_its_plan_is_near() -> None:
    """A receive that nobody sends to occupies a device."""
    pair = Pair(0)
    for seq in range(NUM_PLANS):
        pair.last.post_hidden(seq, 1)
        pair.first.post_feedback(seq, 1)
    assert not any(stream.tasks for stream in pair.devices[0].streams)


@pytest.mark.parametrize("operation", ["receive hidden", "send hidden", "receive feedback", "send feedback"])
def test_an_error_of_a_link_is_a_lost_peer(operation: str) -> None:
    pair = Pair(0)
    for link in (pair.hidden, pair.feedback):
        link.failure = "remote process exited"
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "receive hidden": (lambda: pair.last.wait_hidden(5), 0),
        "send hidden": (lambda: pair.first.send_hidden(5, torch.zeros(1, HIDDEN_SIZE)), 1),
        "receive feedback": (lambda: pair.first.wait_feedback(5), 1),
        "send feedback": (lambda: pair.last.send_feedback(5, torch.zeros(1, 3)), 0),
    }
    call, peer = calls[operation]
    with pytest.raises(PeerLostError, match="remote process exited") as lost:
        call()
    assert (lost.value.peer, lost.value.operation, lost.value.seq) == (peer, operation, 5)


def test_closing_aborts_every_communicator() -> None:
    pair = Pair(0)
    pair.first.close()
    assert pair.hidden.aborted
    assert pair.feedback.aborted
