"""How much KV cache a group gets: arithmetic over what each stage's machine has left. Pure.

It is done twice with the same rules: over what weights and the largest step are counted to take, so that what can't fit
is refused before a weight is read, and over what the loaded stages measured. Stages that share a machine share its
memory. There is a slot for every sequence asked for, whatever the memory: slots are address space, and what they hold
is counted in blocks. When blocks for all slots don't fit, there are fewer, and long sequences wait or are computed
again; when not even one whole sequence fits, the group can't serve and the shortage is named.

Ranks that divide experts hold a token's keys and values on one of them. On a host they take them from one memory; where
they have a device each, each has a pool of blocks, and E devices hold E times what one has room for.
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
    slots_per_cohort: int
    slot_tokens: int
    num_blocks: int
    """What all slots of a pool together may hold."""
    num_pools: int = 1
    """Parts of the cache that have blocks of their own: one, or one for each rank that has slots of its own."""
    room_tokens: tuple[int, ...] = ()
    """By stage, the tokens that its memory has room for beside the weights: the least of them bounds `num_blocks`."""

    @property
    def num_slots(self) -> int:
        return self.num_cohorts * self.slots_per_cohort

    @property
    def num_tokens(self) -> int:
        """What all pools may hold together."""
        return self.num_pools * self.num_blocks * BLOCK_TOKENS

    @property
    def holds_all(self) -> bool:
        """Whether there is memory for every slot to be full."""
        return self.num_blocks >= _full_pool(self.num_slots, self.num_pools, self.slot_tokens)


def _full_pool(num_slots: int, num_pools: int, slot_tokens: int) -> int:
    """Blocks of the pool that has most of the slots, all of them full."""
    return -(-num_slots // num_pools) * blocks_of(slot_tokens)


def size_cache(
    stages: tuple[StageMemory, ...],
    config: ModelConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    element_bytes: int,
    num_pools: int = 1,
) -> CacheSize:
    """Slots for `max_num_seqs` sequences of `max_model_len` tokens, and as many blocks for them as fit every machine.

    Every cohort gets `max_num_seqs // cohorts` slots, never more, but for the one that it can't do without. A device
    holds one of the pools, a host all of them.

    Raises:
        MemoryShortageError: a machine can't hold its stages' weights plus one sequence in each pool.
    """
    num_cohorts = len(stages)
    slots = max(1, max_num_seqs // num_cohorts)
    blocks_per_slot = blocks_of(max_model_len)
    num_blocks = _full_pool(num_cohorts * slots, num_pools, max_model_len)
    room_tokens: dict[int, int] = {}
    for host in dict.fromkeys(stage.room.host for stage in stages):
        here = [stage for stage in stages if stage.room.host == host]
        usable = usable_bytes(stage.room for stage in here)
        held = sum(stage.weight_bytes + stage.step_bytes for stage in here)
        pools_here = 1 if here[0].room.is_device else num_pools
        per_block = pools_here * BLOCK_TOKENS * sum(one.token_bytes(config, element_bytes) for one in here)
        fitting = (usable - held) // per_block
        if fitting < blocks_per_slot:
            smallest = per_block * blocks_per_slot
            raise MemoryShortageError(_shortage(here, usable, smallest, max_model_len))
        num_blocks = min(num_blocks, fitting)
        room_tokens |= dict.fromkeys((stage.stage for stage in here), num_pools * fitting * BLOCK_TOKENS)
    return CacheSize(
        num_cohorts=num_cohorts,
        slots_per_cohort=slots,
        slot_tokens=max_model_len,
        num_blocks=num_blocks,
        num_pools=num_pools,
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
