"""A stage's model of plain integers: each token follows from its whole context, read from the stage's own slots.

A stage keeps what came in at every position of a slot, as a cache does, and hands on a hash of all of it; the last one
turns that into logits. So a token of another request, a lost or repeated one, or one at a wrong position on any stage
changes everything that follows. What a cache in memory would silently allow (a row that skips or repeats a position) is
an error here. `reference_logits` says the same without slots, plans or stages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.paged_store import PagedStore
from stageline_runtime.plan_bus.messages import PlanRow, SlotBlocks, StepPlan

VOCAB_SIZE = 31
MODULUS = 2_147_483_629
PADDING = -1
"""What lies in the hidden tensor's padding; no row may read it."""


def embedded(token: int) -> int:
    """A token as the first stage hands it to its layers."""
    return token * 48_271 + 11


def folded(value: int, addend: int) -> int:
    """The hash of a sequence, one element longer."""
    return (value * 16_807 + addend + 1) % MODULUS


def logits_of(value: int) -> list[float]:
    """Logits of distinct sizes, so that nothing hangs on how equals are ordered."""
    scores = [(value * (2 * token + 3)) % 8_191 + token / VOCAB_SIZE for token in range(VOCAB_SIZE)]
    return [score / 2_000.0 for score in scores]


def reference_logits(tokens: Sequence[int], num_stages: int) -> list[float]:
    """Logits of the token after `tokens`."""
    values = [embedded(token) for token in tokens]
    for stage in range(num_stages):
        value, out = stage, []
        for incoming in values:
            value = folded(value, incoming)
            out.append(value)
        values = out
    return logits_of(values[-1])


class HashModel:
    """Implements `StageModel`; hidden tensors are int64 `[padded_tokens, 1]`."""

    def __init__(self, stage: int, num_blocks: int | None = None) -> None:
        """`num_blocks` is the memory of all slots together; None: enough."""
        self._stage = stage
        self._cache = PagedStore(f"stage {stage}", num_blocks)
        self._newest_plan = -1
        self._verified: set[int] = set()
        """Slots whose newest row was a verifying one: its drafts may be written over."""

    def reserve_cache(self, num_blocks: int) -> None:
        """It has what it was made with."""

    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Apply what a plan says of the slots' blocks."""
        self._cache.change(changes)
        self._verified.difference_update(change.slot for change in changes if not change.blocks)

    def step_batch(self, plan: StepPlan) -> Any:
        """The plan itself is all this model needs."""
        assert plan.seq > self._newest_plan, f"stage {self._stage} runs plan {plan.seq} after {self._newest_plan}"
        self._newest_plan = plan.seq
        return plan

    def embed(self, token_ids: Tensor) -> Tensor:
        """First stage only."""
        return torch.tensor([[embedded(token)] for token in token_ids.tolist()])

    def layers(self, hidden: Tensor, batch: Any) -> Tensor:
        """Write what came in to the slots, hand on the hash of all that lies there."""
        plan: StepPlan = batch
        values = [value for (value,) in hidden.tolist()]
        assert len(values) == plan.padded_tokens, f"plan {plan.seq}: {len(values)} tokens came"
        out: list[int] = []
        for row in plan.rows:
            out += self._run_row(row, values[len(out) : len(out) + row.num_tokens])
        out += [PADDING] * (len(values) - len(out))
        return torch.tensor(out).view(-1, 1)

    def head(self, hidden_rows: Tensor) -> Tensor:
        """Last stage only."""
        return torch.tensor([logits_of(value) for (value,) in hidden_rows.tolist()]).view(-1, VOCAB_SIZE)

    def _run_row(self, row: PlanRow, values: list[int]) -> list[int]:
        if row.slot in self._verified:
            self._cache.forget(row.slot, row.position)
        self._cache.write(row.slot, row.position, values)
        self._verified.add(row.slot) if row.num_drafts else self._verified.discard(row.slot)
        value, out = self._stage, []
        for incoming in self._cache.read(row.slot, row.position + row.num_tokens):
            value = folded(value, incoming)
            out.append(value)
        return out[row.position :]
