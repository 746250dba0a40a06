"""The last stage's memory of how each slot's request samples, and the tensor work around the sampler."""

import torch
from torch import Tensor

from stageline_runtime.messages import RowSampling, SampledRow, SlotFill, StepPlan
from stageline_runtime.sampling.sampler import SamplingRow, sample


class SamplingState:
    """Sampling parameters by slot; filled by the plan that gives the slot out."""

    def __init__(self) -> None:
        self._by_slot: dict[int, tuple[int, RowSampling]] = {}

    def fill(self, fill: SlotFill) -> None:
        """A request takes a slot."""
        self._by_slot[fill.slot] = (fill.generation, fill.sampling)

    def sample(self, plan: StepPlan, logits: Tensor) -> tuple[tuple[SampledRow, ...], Tensor]:
        """Sample the plan's rows from logits `[num_sampled_rows, vocab_size]`.

        Returns the rows for the engine and the feedback tensor `[num_sampled_rows, 3]` for the first stage.
        """
        rows = plan.sampled_rows
        tokens = sample(logits, [self._row(row.slot, row.position + row.num_tokens) for row in rows])
        sampled = tuple(
            SampledRow(row.slot, row.generation, token) for row, token in zip(rows, tokens.tolist(), strict=True)
        )
        feedback = torch.tensor([[row.generation, 1, row.token] for row in sampled], dtype=torch.int64)
        return sampled, feedback

    def _row(self, slot: int, position: int) -> SamplingRow:
        # A row that runs dead may find its slot's next holder here; its token is dropped by generation anyway.
        _, sampling = self._by_slot[slot]
        return SamplingRow(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            choice=sampling.choice,
            position=position,
        )


def sampled_token_indices(plan: StepPlan) -> list[int]:
    """Index within the step of the token whose hidden state each sampled row is sampled from."""
    indices = []
    offset = 0
    for row in plan.rows:
        offset += row.num_tokens
        if row.need_sample:
            indices.append(offset - 1)
    return indices
