"""Rank r talks to rank r of the next stage with its columns; the ranks there gather the whole."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from oracles.thread_ranks import ThreadRank, ThreadRanks
from stageline_runtime.transport.protocol import LoopbackTransport
from stageline_runtime.transport.rendezvous import GATHER_HIDDEN, RankLane


class Wire(LoopbackTransport):
    """One lane: what is sent is what is received."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, Tensor] = {}

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        self.sent[seq] = hidden

    def wait_hidden(self, seq: int) -> Tensor:
        return self.sent.pop(seq)


def test_parts_cross_and_the_whole_arrives() -> None:
    hidden = torch.arange(5 * 12, dtype=torch.bfloat16).view(5, 12)
    shared = ThreadRanks(3)
    wires = [Wire() for _ in range(3)]

    def cross(rank: ThreadRank) -> Tensor:
        lane = RankLane(wires[rank.rank], rank)
        lane.send_hidden(4, hidden)
        assert wires[rank.rank].sent[4].shape == (5, 4), "a third of the bytes on each lane"
        return lane.wait_hidden(4)

    with ThreadPoolExecutor(3) as threads:
        received = list(threads.map(cross, shared.ranks))
    for whole in received:
        assert torch.equal(whole, hidden), whole
        assert whole.is_contiguous()
    assert shared.operations == [GATHER_HIDDEN]
