"""What a stage holds and what its host has room for: weights plus the smallest cache. Pure.

The engine's cache sizing, its cut and `stageline plan` share this arithmetic, so a cut that is found here can be served
and one that can't is refused before any weight is read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import end_parameters, layer_parameters

USABLE_SHARE = 0.9
"""The rest is for activations, the allocator's slack and the process itself."""

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """Where a stage runs and how much memory is free there. Stages with the same `host` share it."""

    host: str
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """Stages that share a host, and the most layers that fit there together (negative when not even the ends fit)."""

    stages: tuple[int, ...]
    most_layers: int


def usable_bytes(available_bytes: Iterable[int]) -> int:
    """Bytes that stages of one host may take together, from what each saw there at a moment of its own."""
    return int(min(available_bytes) * USABLE_SHARE)


def weight_bytes(config: ModelConfig, layers: LayerRange, *, is_first: bool, is_last: bool, element_bytes: int) -> int:
    """Bytes of the weights of a stage, from the config alone."""
    held = sum(layer_parameters(config, layer) for layer in range(layers.first, layers.last + 1))
    return element_bytes * (held + end_parameters(config, is_first=is_first, is_last=is_last))


def largest_layer_parameters(config: ModelConfig) -> int:
    """Weights of the largest layer: what a layer is taken to weigh before it is known which ones a stage gets."""
    return max(layer_parameters(config, layer) for layer in range(config.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class CutMemory:
    """What a cut must fit: the stages' rooms, in stage order, and the shape of what goes into them."""

    config: ModelConfig
    rooms: tuple[StageRoom, ...]
    max_model_len: int
    element_bytes: int

    def weight_bytes(self, stage: int, num_layers: int) -> int:
        """Weights of `stage` with `num_layers` layers; where layers differ, enough for the largest ones."""
        ends = end_parameters(self.config, is_first=stage == 0, is_last=stage == len(self.rooms) - 1)
        return self.element_bytes * (num_layers * largest_layer_parameters(self.config) + ends)

    def needed_bytes(self, stage: int, num_layers: int) -> int:
        """Weights and smallest cache of `stage`: one sequence of `max_model_len` tokens."""
        per_token = self.config.kv_bytes_per_token(num_layers, self.element_bytes)
        return self.weight_bytes(stage, num_layers) + per_token * self.max_model_len

    def stages_of_hosts(self) -> dict[str, list[int]]:
        """Stages of each host, hosts in the order in which stages first name them."""
        stages: dict[str, list[int]] = {}
        for stage, room in enumerate(self.rooms):
            stages.setdefault(room.host, []).append(stage)
        return stages

    def usable_bytes_of(self, stages: Sequence[int]) -> int:
        return usable_bytes(self.rooms[stage].available_bytes for stage in stages)

    def shortages(self, counts: Sequence[int]) -> list[tuple[list[int], int]]:
        """Stages of a host and the bytes they lack there, for each host that can't hold `counts` layers."""
        lacking = []
        for stages in self.stages_of_hosts().values():
            missing = sum(self.needed_bytes(stage, counts[stage]) for stage in stages) - self.usable_bytes_of(stages)
            if missing > 0:
                lacking.append((stages, missing))
        return lacking

    def host_rooms(self) -> tuple[HostRoom, ...]:
        """The same in whole layers, as `partition` counts."""
        rooms = []
        layer_bytes = self.needed_bytes(0, 1) - self.needed_bytes(0, 0)
        for stages in self.stages_of_hosts().values():
            free = self.usable_bytes_of(stages) - sum(self.needed_bytes(stage, 0) for stage in stages)
            rooms.append(HostRoom(stages=tuple(stages), most_layers=free // layer_bytes))
        return tuple(rooms)


def mebibytes(size_bytes: int) -> int:
    """Rounded up, so that what is missing never reads as nothing."""
    return -(-size_bytes // MEBIBYTE)
