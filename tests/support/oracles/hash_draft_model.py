"""A draft model for `hash_model`: it says what the whole pipeline would say, from the ids that lie in its own slots.

What a draft model's cache must never do is an error here, or shows in its drafts: they are then not what the pipeline
says, which nothing else in a group would notice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.hash_model import reference_logits
from oracles.paged_store import PagedStore
from stageline_runtime.plan_bus.messages import SlotBlocks, StepPlan


class HashDraftModel:
    """Implements `StageModel`; a hidden row is where its context ends: which sequence of those seen, `[1]` int64."""

    def __init__(self, num_stages: int, num_blocks: int | None = None) -> None:
        """`num_stages` of the pipeline that it speaks for. `num_blocks` is the memory of all slots together; None:
        enough.
        """
        self._num_stages = num_stages
        self._cache = PagedStore("draft model", num_blocks)
        self._contexts: list[tuple[int, ...]] = []
        self.tokens_computed = 0

    def reserve_cache(self, num_blocks: int) -> None:
        """It has what it was made with."""

    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Apply what a plan says of the slots' blocks."""
        self._cache.change(changes)

    def step_batch(self, plan: StepPlan) -> Any:
        """The plan itself is all this model needs."""
        return plan

    def embed(self, token_ids: Tensor) -> Tensor:
        """The ids themselves."""
        return token_ids.view(-1, 1)

    def layers(self, hidden: Tensor, batch: Any) -> Tensor:
        """Write the ids to the slots; what was drafted before and came otherwise is written over."""
        plan: StepPlan = batch
        ids = hidden.view(-1).tolist()
        self._contexts = []
        for row in plan.rows:
            first = len(self._contexts)
            self._cache.write(row.slot, row.position, ids[first : first + row.num_tokens], over=True)
            context = self._cache.read(row.slot, row.position + row.num_tokens)
            self._contexts += [tuple(context[: row.position + count]) for count in range(1, row.num_tokens + 1)]
        self.tokens_computed += len(self._contexts)
        self._contexts += [(0,)] * (plan.padded_tokens - len(self._contexts))
        return torch.arange(plan.padded_tokens).view(-1, 1)

    def head(self, hidden_rows: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` of the token after each row's context."""
        return torch.tensor([self._logits(self._contexts[index]) for index in hidden_rows.view(-1).tolist()])

    def _logits(self, context: Sequence[int]) -> list[float]:
        return reference_logits(context, self._num_stages)
