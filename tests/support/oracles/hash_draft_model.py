"""A draft model for `hash_model`: it says what the whole pipeline would say, from the ids that lie in its own slots.

What a draft model's cache must never do is an error here, or shows in its drafts: they are then not what the pipeline
says, which nothing else in a group would notice.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from oracles.hash_model import reference_logits
from stageline_runtime.models.cpu.kv_cache import AttentionBatch
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of


class HashDraftModel:
    """Implements `StageModel`; a hidden row is where its context ends: which sequence of those seen, `[1]` int64."""

    def __init__(self, num_stages: int, num_slots: int, num_blocks: int | None = None) -> None:
        """`num_stages` of the pipeline that it speaks for. `num_blocks` is the memory of all slots together, given back
        as a paged cache does; None: enough.
        """
        self._num_stages = num_stages
        self._num_blocks = num_blocks
        self._held_blocks = [0] * num_slots
        self._cache: list[list[int]] = [[] for _ in range(num_slots)]
        self._contexts: list[tuple[int, ...]] = []
        self.tokens_computed = 0

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """The plan itself is all this model needs."""
        return cast(AttentionBatch, plan)

    def reset_slot(self, slot: int, keep_tokens: int = 0) -> None:
        """Forget what a slot holds, but for its first tokens, which must be there."""
        assert len(self._cache[slot]) >= keep_tokens, f"draft slot {slot} can't keep {keep_tokens} tokens"
        del self._cache[slot][keep_tokens:]
        self._give_back(slot, keep_tokens)

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot's first tokens, which must be there, to an empty slot."""
        assert len(self._cache[source]) >= num_tokens, f"draft slot {source} lacks {num_tokens} tokens"
        assert not self._cache[target], f"draft slot {target} was not reset"
        self._cache[target] = self._cache[source][:num_tokens]
        self._hold(target, num_tokens)

    def trim_slot(self, slot: int, num_tokens: int) -> None:
        """Forget what a slot holds behind its first tokens."""
        del self._cache[slot][num_tokens:]
        self._give_back(slot, num_tokens)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The ids themselves."""
        return token_ids.view(-1, 1)

    def layers(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Write the ids to the slots; what was drafted before and came otherwise is written over."""
        plan = cast(StepPlan, batch)
        ids = hidden.view(-1).tolist()
        self._contexts = []
        for row in plan.rows:
            cache = self._cache[row.slot]
            assert len(cache) >= row.position, f"draft slot {row.slot}: {len(cache)} tokens lie before {row}"
            for index in range(row.num_tokens):
                cache[row.position + index :] = [ids[len(self._contexts)]]
                self._contexts.append(tuple(cache))
            self._hold(row.slot, row.position + row.num_tokens)
        self.tokens_computed += len(self._contexts)
        self._contexts += [(0,)] * (plan.padded_tokens - len(self._contexts))
        return torch.arange(plan.padded_tokens).view(-1, 1)

    def head(self, hidden_rows: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` of the token after each row's context."""
        return torch.tensor([self._logits(self._contexts[index]) for index in hidden_rows.view(-1).tolist()])

    def _hold(self, slot: int, num_tokens: int) -> None:
        self._held_blocks[slot] = max(self._held_blocks[slot], blocks_of(num_tokens))
        used = sum(self._held_blocks)
        assert self._num_blocks is None or used <= self._num_blocks, f"draft slot {slot}: {used} of {self._num_blocks}"

    def _give_back(self, slot: int, num_tokens: int) -> None:
        self._held_blocks[slot] = min(self._held_blocks[slot], blocks_of(num_tokens))

    def _logits(self, context: Sequence[int]) -> list[float]:
        return reference_logits(context, self._num_stages)
