"""The NCCL transport's waits, on streams whose work runs in a drawn order: every tensor arrives as it was sent.

Two stages share one simulated machine; the real links run over a stand-in for torch's process group, which moves a
tensor when both ends' streams have come to it. A ring slot written too early, a receive posted where it isn't awaited
or a read before the receive gives a wrong number or a standstill under some seed. What NCCL itself does on a GPU is
`make gpu-check`'s to show.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.simulated_accelerator import SimulatedAccelerator, SimulatedStream
from oracles.simulated_nccl import REFUSAL, SimulatedCommunicator, SimulatedErrorType, SimulatedProcessGroup
from stageline_runtime.planning.memory import FEEDBACK_RING, HIDDEN_RING
from stageline_runtime.transport.nccl import NcclLink, NcclTransport
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes

NUM_PLANS = 3 * HIDDEN_RING
HIDDEN_SIZE = 2
MAX_TOKENS, MAX_ROWS = 4, 3


class Pair:
    """A first and a last stage on one machine."""

    def __init__(self, seed: int) -> None:
        first = SimulatedAccelerator(seed)
        self.devices = (first, SimulatedAccelerator(seed + 1, beside=first))
        self.hidden, self.feedback = SimulatedCommunicator(), SimulatedCommunicator()
        self.first, self.last = (self._transport(stage) for stage in (0, 1))

    def _transport(self, stage: int) -> NcclTransport:
        return NcclTransport(
            self.devices[stage],
            before=self._link(self.hidden, stage) if stage == 1 else None,
            after=self._link(self.hidden, stage) if stage == 0 else None,
            feedback=self._link(self.feedback, stage),
            stage=stage,
            stage_count=2,
            sizes=WireSizes(
                hidden_size=HIDDEN_SIZE, dtype=torch.float32, max_step_tokens=MAX_TOKENS, max_rows=MAX_ROWS
            ),
        )

    def _link(self, communicator: SimulatedCommunicator, stage: int) -> NcclLink:
        return NcclLink(SimulatedProcessGroup(communicator, self.devices[stage]), 1 - stage)

    def settle(self) -> None:
        """Run all that can run; what waits for the other stage stays."""
        while self.devices[0].run_one():
            pass

    def compute(self, stage: int, work: Callable[[], object]) -> None:
        cast(SimulatedStream, self.devices[stage].main).queue(work)


def tokens_of(seq: int) -> int:
    return 1 + seq % MAX_TOKENS


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


@given(st.integers(0, 10_000))
def test_feedback_arrives_beside_hidden_tensors(seed: int) -> None:
    pair = Pair(seed)
    rows = torch.zeros(MAX_ROWS, FEEDBACK_WIDTH, dtype=torch.int64)
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


def exchange(pair: Pair, seq: int) -> None:
    """A hidden tensor there and feedback back, over on the device when it returns."""
    pair.last.post_hidden(seq, 1)
    pair.first.post_feedback(seq, 1)
    pair.first.send_hidden(seq, torch.zeros(1, HIDDEN_SIZE))
    pair.last.wait_hidden(seq)
    pair.last.send_feedback(seq, torch.zeros(1, FEEDBACK_WIDTH, dtype=torch.int64))
    pair.first.wait_feedback(seq)
    pair.devices[0].synchronize()


def lost_peer(pair: Pair, operation: str) -> tuple[PeerLostError, int]:
    """What plan 5's `operation` says, and the peer that it is about."""
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "receive hidden": (lambda: pair.last.wait_hidden(5), 0),
        "send hidden": (lambda: pair.first.send_hidden(5, torch.zeros(1, HIDDEN_SIZE)), 1),
        "receive feedback": (lambda: pair.first.wait_feedback(5), 1),
        "send feedback": (lambda: pair.last.send_feedback(5, torch.zeros(1, FEEDBACK_WIDTH, dtype=torch.int64)), 0),
    }
    call, peer = calls[operation]
    with pytest.raises(PeerLostError) as lost:
        call()
    return lost.value, peer


OPERATIONS = ["receive hidden", "send hidden", "receive feedback", "send feedback"]


@pytest.mark.parametrize("error", [SimulatedErrorType.TIMEOUT, SimulatedErrorType.COMM_ERROR], ids=lambda it: it.name)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_that_torchs_watchdog_found_is_a_lost_peer(operation: str, error: SimulatedErrorType) -> None:
    """It aborts the communicator: operations then complete, and none of them says that it has no data."""
    pair = Pair(0)
    exchange(pair, 4)
    for communicator in (pair.hidden, pair.feedback):
        communicator.end_by_watchdog(error)
    lost, peer = lost_peer(pair, operation)
    assert (lost.peer, lost.operation, lost.seq) == (peer, operation, 5)
    assert f"NCCL reported {error.name}" in str(lost)
    again, _ = lost_peer(pair, operation)
    assert str(again) == str(lost), "forgotten once no operation is outstanding"


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("what", ["hidden", "feedback"])
def test_nothing_is_told_of_a_plan_whose_receive_may_have_been_given_up(stage: int, what: str) -> None:
    pair = Pair(0)
    exchange(pair, 4)
    transport = (pair.first, pair.last)[stage]
    transport.check(3)
    getattr(pair, what).end_by_watchdog(SimulatedErrorType.COMM_ERROR)
    with pytest.raises(PeerLostError, match=r"^plan 3: .*NCCL reported COMM_ERROR") as lost:
        transport.check(3)
    receives = (what == "hidden") == (stage == 1)
    assert (lost.value.peer, lost.value.operation) == (1 - stage, f"{'receive' if receives else 'send'} {what}")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_nccl_refuses_is_a_lost_peer(operation: str) -> None:
    """As on a communicator that the watchdog has aborted before its error can be read."""
    pair = Pair(0)
    exchange(pair, 4)
    if operation == "receive feedback":
        pair.first.post_feedback(5, 1)
    pair.last.post_hidden(5, 1)
    for communicator in (pair.hidden, pair.feedback):
        communicator.is_refusing = True
    lost, peer = lost_peer(pair, operation)
    assert (lost.peer, lost.operation, lost.seq) == (peer, operation, 5)
    assert REFUSAL in str(lost)


def test_feedback_is_received_from_when_its_plan_is_sent_on() -> None:
    """At consumption the receive would start only when the first stage waits for it."""
    pair = Pair(0)
    for seq in range(FEEDBACK_RING):
        pair.first.post_feedback(seq, 1)
        pair.last.send_feedback(seq, torch.full((1, FEEDBACK_WIDTH), seq, dtype=torch.int64))
    pair.settle()
    assert pair.feedback.num_received == 0
    pair.first.send_hidden(0, torch.zeros(1, HIDDEN_SIZE))
    pair.settle()
    assert pair.feedback.num_received == 1
    seen = []
    for seq in range(FEEDBACK_RING):
        taken = pair.first.wait_feedback(seq)
        pair.compute(0, lambda taken=taken: seen.append(taken[0, 0].item()))  # type: ignore[misc]
    pair.settle()
    assert seen == list(range(FEEDBACK_RING))
