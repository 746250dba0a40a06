"""How much KV cache a group gets: arithmetic over what each stage's machine has left. Pure.

It is done twice with the same rules: over what weights and the largest step are counted to take, so that what can't fit
is refused before a weight is read, and over what the loaded stages measured. Stages that share a machine share its
memory. There is a slot for every sequence asked for, whatever the memory: slots are address space, and what they hold
is counted in blocks. When blocks for all slots don't fit, there are fewer, and long sequences wait or are computed
again; when not even one whole sequence fits, the group can't serve and the shortage is named.

Ranks that divide experts hold a token's keys and values on one of them, each in a pool of blocks of its own. On a host
these share one memory; where the ranks have a device each, E devices hold E times what one has room for.
"""

from dataclasses import dataclass, replace

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of
from stageline_runtime.planning.memory import DraftMemory, StageRoom, mebibytes, usable_bytes


class MemoryShortageError(Exception):
    """Not even one sequence fits; the message says where and how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage reported and what it holds."""

    stage: int
    room: StageRoom
    layers: LayerRange
    weight_bytes: int
    step_bytes: int
    """What its largest step takes beside weights and cache."""
    kv_ranks: int = 1
    """Ranks that share each token's keys and values, of which the room is one's."""
    draft_token_bytes: int = 0
    """What each token's keys and values take in the draft model that it holds."""

    def with_draft(self, draft: DraftMemory) -> "StageMemory":
        """The same stage with a draft model beside its layers: they don't run at once."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + draft.weight_bytes,
            step_bytes=max(self.step_bytes, draft.step_bytes),
            draft_token_bytes=draft.token_bytes,
        )

    def token_bytes(self, config: ModelConfig, element_bytes: int) -> int:
        """What each token's keys and values take of the room."""
        whole = config.kv_bytes_per_token(self.layers.count, element_bytes)
        return whole // self.kv_ranks + self.draft_token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The cache's shape, equal on all stages."""

    num_cohorts: int
    num_slots: int
    slot_tokens: int
    num_blocks: int
    """What all slots of a rank together may hold."""
    num_ranks: int = 1
    """Ranks of a stage among which the slots are divided, each with blocks of its own."""
    room_tokens: tuple[int, ...] = ()
    """By stage, the tokens that its memory has room for beside the weights: the least of them bounds `num_blocks`."""

    @property
    def num_tokens(self) -> int:
        """What all ranks may hold together."""
        return self.num_ranks * self.num_blocks * BLOCK_TOKENS

    @property
    def holds_all(self) -> bool:
        """Whether there is memory for every slot to be full."""
        return self.num_blocks >= _full_pool(self.num_slots, self.num_ranks, self.slot_tokens)


def _full_pool(num_slots: int, num_ranks: int, slot_tokens: int) -> int:
    """Blocks of the rank that has most of the slots, all of them full."""
    return -(-num_slots // num_ranks) * blocks_of(slot_tokens)


def size_cache(
    stages: tuple[StageMemory, ...],
    config: ModelConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    element_bytes: int,
    num_ranks: int = 1,
) -> CacheSize:
    """Slots for `max_num_seqs` sequences of `max_model_len` tokens, and as many blocks for them as fit every machine.

    A device holds the blocks of one rank, a host those of all.

    Raises:
        MemoryShortageError: a machine can't hold its stages' weights plus one sequence of each rank.
    """
    blocks_per_slot = blocks_of(max_model_len)
    num_blocks = _full_pool(max_num_seqs, num_ranks, max_model_len)
    room_tokens: dict[int, int] = {}
    for host in dict.fromkeys(stage.room.host for stage in stages):
        here = [stage for stage in stages if stage.room.host == host]
        usable = usable_bytes(stage.room for stage in here)
        held = sum(stage.weight_bytes + stage.step_bytes for stage in here)
        ranks_here = 1 if here[0].room.is_device else num_ranks
        per_block = ranks_here * BLOCK_TOKENS * sum(one.token_bytes(config, element_bytes) for one in here)
        fitting = (usable - held) // per_block
        if fitting < blocks_per_slot:
            smallest = per_block * blocks_per_slot
            raise MemoryShortageError(_shortage(here, usable, smallest, max_model_len))
        num_blocks = min(num_blocks, fitting)
        room_tokens |= dict.fromkeys((stage.stage for stage in here), num_ranks * fitting * BLOCK_TOKENS)
    return CacheSize(
        num_cohorts=len(stages),
        num_slots=max_num_seqs,
        slot_tokens=max_model_len,
        num_blocks=num_blocks,
        num_ranks=num_ranks,
        room_tokens=tuple(room_tokens[stage] for stage in sorted(room_tokens)),
    )


def _shortage(here: list[StageMemory], usable: int, cache: int, max_model_len: int) -> str:
    names = ", ".join(str(stage.stage) for stage in here)
    weights = sum(stage.weight_bytes for stage in here)
    step = sum(stage.step_bytes for stage in here)
    missing = weights + step + cache - usable
    return (
        f"stage {names}: {mebibytes(missing)} MiB of memory are missing: weights take {mebibytes(weights)} MiB, "
        f"the largest step {mebibytes(step)} MiB and the smallest cache (one sequence of maxModelLen {max_model_len}) "
        f"{mebibytes(cache)} MiB, but {mebibytes(usable)} MiB are usable; lower spec.engine.maxModelLen or "
        "maxNumBatchedTokens, or use more stages"
    )
