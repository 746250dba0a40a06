"""A stage's model of plain integers: each token follows from its whole context, read from the stage's own slots.

A stage keeps what came in at every position of a slot, as a cache does, and hands on a hash of all of it; the last one
turns that into logits. So a token of another request, a lost or repeated one, or one at a wrong position on any stage
changes everything that follows. What a cache in memory would silently allow (a row that skips or repeats a position, a
slot that was not reset) is an error here. `reference_logits` says the same without slots, plans or stages.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from stageline_runtime.models.cpu.kv_cache import AttentionBatch
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of

VOCAB_SIZE = 31
MODULUS = 2_147_483_629
CANCELLED = -2
"""What lies where a row that ran dead elsewhere wrote nothing."""
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

    def __init__(self, stage: int, num_slots: int, num_blocks: int | None = None) -> None:
        """`num_blocks` is the memory of all slots together; None: enough."""
        self._num_blocks = num_blocks
        self._stage = stage
        self._cache: list[list[int]] = [[] for _ in range(num_slots)]
        self._newest_plan = -1
        self._verified: set[int] = set()
        """Slots whose newest row was a verifying one: its drafts may be written over."""

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """The plan itself is all this model needs."""
        assert plan.seq > self._newest_plan, f"stage {self._stage} runs plan {plan.seq} after {self._newest_plan}"
        self._newest_plan = plan.seq
        return cast(AttentionBatch, plan)

    def reset_slot(self, slot: int, keep_tokens: int = 0) -> None:
        """Forget what a slot holds, but for its first tokens, which must be there."""
        self._verified.discard(slot)
        assert len(self._cache[slot]) >= keep_tokens, (
            f"stage {self._stage}: slot {slot} can't keep {keep_tokens} tokens"
        )
        del self._cache[slot][keep_tokens:]

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot's first tokens, which must be there, to an empty slot."""
        assert len(self._cache[source]) >= num_tokens, f"stage {self._stage}: slot {source} lacks {num_tokens} tokens"
        assert not self._cache[target], f"stage {self._stage}: slot {target} was not reset"
        self._cache[target] = self._cache[source][:num_tokens]

    def trim_slot(self, slot: int, num_tokens: int) -> None:
        """Forget what a slot holds behind its first tokens."""
        del self._cache[slot][num_tokens:]

    def embed(self, token_ids: Tensor) -> Tensor:
        """First stage only."""
        return torch.tensor([[embedded(token)] for token in token_ids.tolist()])

    def layers(self, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Write what came in to the slots, hand on the hash of all that lies there."""
        plan = cast(StepPlan, batch)
        values = [value for (value,) in hidden.tolist()]
        assert len(values) == plan.padded_tokens, f"plan {plan.seq}: {len(values)} tokens came"
        out: list[int] = []
        for row in plan.rows:
            out += self._run_row(plan.seq, row, values[len(out) : len(out) + row.num_tokens])
        self._check_memory(plan.seq)
        out += [PADDING] * (len(values) - len(out))
        return torch.tensor(out).view(-1, 1)

    def head(self, hidden_rows: Tensor) -> Tensor:
        """Last stage only."""
        return torch.tensor([logits_of(value) for (value,) in hidden_rows.tolist()]).view(-1, VOCAB_SIZE)

    def _run_row(self, seq: int, row: PlanRow, values: list[int]) -> list[int]:
        cache = self._cache[row.slot]
        if row.slot in self._verified:
            del cache[row.position :]
            # A guess before it may have been cancelled here; then this one is wrong too, whatever lies before it.
            cache += [CANCELLED] * (row.position - len(cache) if row.num_drafts else 0)
        assert len(cache) == row.position, f"plan {seq}, stage {self._stage}: {len(cache)} tokens lie before {row}"
        self._verified.add(row.slot) if row.num_drafts else self._verified.discard(row.slot)
        cache += values
        value, out = self._stage, []
        for incoming in cache:
            value = folded(value, incoming)
            out.append(value)
        return out[row.position :]

    def _check_memory(self, seq: int) -> None:
        used = sum(blocks_of(len(cache)) for cache in self._cache)
        assert self._num_blocks is None or used <= self._num_blocks, f"plan {seq}: {used} of {self._num_blocks} blocks"
