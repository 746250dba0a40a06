"""How much KV cache a group gets: arithmetic over what each stage's machine has left. Pure.

Stages that share a machine share its memory. When the asked-for number of sequences doesn't fit, fewer are admitted at
once and that is said; when not even one sequence per cohort fits, the group can't serve and the shortage is named.
"""

from dataclasses import dataclass

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.planning.memory import mebibytes, usable_bytes, weight_bytes

__all__ = ["CacheSize", "MemoryShortageError", "StageMemory", "size_cache", "weight_bytes"]


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
        usable = usable_bytes(stage.available_bytes for stage in here)
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
        f"stage {names}: {mebibytes(missing)} MiB of memory are missing: weights take {mebibytes(weights)} MiB and "
        f"the smallest cache (one sequence of maxModelLen {max_model_len} per cohort) {mebibytes(cache)} MiB, "
        f"but {mebibytes(usable)} MiB are usable; lower spec.engine.maxModelLen or use more stages"
    )
