"""How much KV cache a group gets: arithmetic over what each stage's machine has left. Pure.

Stages that share a machine share its memory. When the asked-for number of sequences doesn't fit, fewer are admitted at
once and that is said; when not even one sequence per cohort fits, the group can't serve and the shortage is named.
"""

from dataclasses import dataclass

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_config import ModelConfig

USABLE_SHARE = 0.9
"""The rest is for activations, the allocator's slack and the process itself."""


class MemoryShortageError(Exception):
    """Not even one sequence fits; the message says where and how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage reported and what it will hold."""

    stage: int
    host: str
    available_bytes: int
    layers: LayerRange
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The cache's shape, equal on all stages."""

    num_cohorts: int
    slots_per_cohort: int
    slot_tokens: int


def weight_bytes(config: ModelConfig, layers: LayerRange, *, is_first: bool, is_last: bool, element_bytes: int) -> int:
    """Bytes of the weights of a stage, from the config alone."""
    qkv = config.hidden_size * config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    output = config.num_heads * config.head_dim * config.hidden_size
    per_layer = qkv + output + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    # A tied matrix counts twice even on a lone stage: dense for look-ups, packed for the head.
    matrices = int(is_first) + int(is_last)
    return element_bytes * (per_layer * layers.count + matrices * config.vocab_size * config.hidden_size)


def size_cache(
    stages: tuple[StageMemory, ...],
    config: ModelConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    element_bytes: int,
) -> CacheSize:
    """The largest cache up to `max_num_seqs` sequences of `max_model_len` tokens that fits every machine.

    Raises:
        MemoryShortageError: a machine can't hold its stages' weights plus one sequence per cohort.
    """
    num_cohorts = len(stages)
    slots = max(1, -(-max_num_seqs // num_cohorts))
    for host in dict.fromkeys(stage.host for stage in stages):
        here = [stage for stage in stages if stage.host == host]
        usable = int(min(stage.available_bytes for stage in here) * USABLE_SHARE)
        weights = sum(stage.weight_bytes for stage in here)
        per_token = sum(config.kv_bytes_per_token(stage.layers.count, element_bytes) for stage in here)
        per_slot_of_each_cohort = per_token * max_model_len * num_cohorts
        fitting = (usable - weights) // per_slot_of_each_cohort
        if fitting < 1:
            raise MemoryShortageError(_shortage(here, usable, weights, per_slot_of_each_cohort, max_model_len))
        slots = min(slots, fitting)
    return CacheSize(num_cohorts=num_cohorts, slots_per_cohort=slots, slot_tokens=max_model_len)


def _shortage(here: list[StageMemory], usable: int, weights: int, cache: int, max_model_len: int) -> str:
    names = ", ".join(str(stage.stage) for stage in here)
    missing = weights + cache - usable
    return (
        f"stage {names}: {_mebibytes(missing)} MiB of memory are missing: weights take {_mebibytes(weights)} MiB and "
        f"the smallest cache (one sequence of maxModelLen {max_model_len} per cohort) {_mebibytes(cache)} MiB, "
        f"but {_mebibytes(usable)} MiB are usable; lower spec.engine.maxModelLen or use more stages"
    )


def _mebibytes(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 20))
