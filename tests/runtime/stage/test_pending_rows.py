"""Sampled rows on their way to the host."""

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.plan_bus.messages import SampledRow
from stageline_runtime.stage.step.pending_rows import PendingRows


def test_rows_that_were_read_hold_no_tensor() -> None:
    """A slot keeps its newest rows until it samples again, but no log probabilities of a whole vocabulary."""
    tokens, scores = torch.tensor([7]), torch.zeros(1, 1000)

    def read(copies: Sequence[Tensor]) -> tuple[SampledRow, ...]:
        return (SampledRow(0, 1, int(copies[0][0])),)

    held = weakref.ref(scores)
    pending = PendingRows(HOST, (tokens, scores), read)
    del scores
    assert held() is not None
    assert [row.token for row in pending.rows()] == [7]
    gc.collect()
    assert held() is None
    assert [row.token for row in pending.rows()] == [7], "again, without reading"
