"""How much KV cache a group gets: arithmetic over what each stage's machine has left. Pure.

It is done twice with the same rules: over what weights and the largest step are counted to take, so that what can't fit
is refused before a weight is read, and over what the loaded stages measured. Stages that share a machine share its
memory. There is a slot for every sequence asked for, whatever the memory: slots are address space, and what they hold
is counted in blocks. When blocks for all slots don't fit, there are fewer, and long sequences wait or are computed
again; when not even one whole sequence fits, the group can't serve and the shortage is named.

Ranks that divide experts hold a token's keys and values on one of them, each in a pool of blocks of its own. On a host
these share one memory; where the ranks have a device each, E devices hold E times what one has room for.
"""

from dataclasses import dataclass

from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of
from stageline_runtime.planning.memory import HostMemory, StageMemory, hosts_of, mebibytes


class MemoryShortageError(Exception):
    """Not even one sequence fits; the message says where and how much is missing."""


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
    """By stage, the tokens that fit in its memory beside the weights: the smallest value bounds `num_blocks`."""

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
    stages: tuple[StageMemory, ...], *, max_num_seqs: int, max_model_len: int, num_ranks: int = 1
) -> CacheSize:
    """Slots for `max_num_seqs` sequences of `max_model_len` tokens, and as many blocks for them as fit every machine.

    `num_ranks`: ranks of a stage that have sequences of their own.

    Raises:
        MemoryShortageError: a machine can't hold its stages' weights plus one sequence of each rank.
    """
    num_blocks = _full_pool(max_num_seqs, num_ranks, max_model_len)
    room_tokens: dict[int, int] = {}
    for host in hosts_of(stages):
        fitting = host.cache_tokens // BLOCK_TOKENS
        if fitting < blocks_of(max_model_len):
            raise MemoryShortageError(_shortage(host, max_model_len))
        num_blocks = min(num_blocks, fitting)
        room_tokens |= {stage.stage: num_ranks * fitting * BLOCK_TOKENS for stage in host.stages}
    return CacheSize(
        num_cohorts=len(stages),
        num_slots=max_num_seqs,
        slot_tokens=max_model_len,
        num_blocks=num_blocks,
        num_ranks=num_ranks,
        room_tokens=tuple(room_tokens[stage] for stage in sorted(room_tokens)),
    )


def _shortage(host: HostMemory, max_model_len: int) -> str:
    names = ", ".join(str(stage.stage) for stage in host.stages)
    weights = mebibytes(sum(stage.weight_bytes for stage in host.stages))
    step = mebibytes(sum(stage.step_bytes for stage in host.stages))
    missing = host.missing_bytes(blocks_of(max_model_len) * BLOCK_TOKENS)
    cache = missing + host.usable_bytes - sum(stage.fixed_bytes for stage in host.stages)
    return (
        f"stage {names}: {mebibytes(missing)} MiB of memory are missing: weights take {weights} MiB, "
        f"the largest step {step} MiB and the smallest cache (one sequence of maxModelLen {max_model_len}) "
        f"{mebibytes(cache)} MiB, but {mebibytes(host.usable_bytes)} MiB are usable; lower spec.engine.maxModelLen or "
        "maxNumBatchedTokens, or use more stages"
    )
