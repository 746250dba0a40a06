"""What one stage holds and how large its buffers are: decided once by the engine, the same for all parts that load."""

from dataclasses import dataclass

import torch

from stageline_api.runtime_config import LayerRange

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Everything that a model is built from besides its checkpoint."""

    layers: LayerRange
    is_first: bool
    """Whether the stage embeds."""
    is_last: bool
    """Whether the stage has the head."""
    dtype: torch.dtype
    num_cohorts: int
    slots_per_cohort: int
    slot_tokens: int
    """Capacity of one slot in tokens."""
    num_blocks: int = 0
    """Blocks that all slots together ever hold; 0: as many as they could. For caches that are paged."""
    max_step_tokens: int = 512
    """Most tokens of a plan, padding included; only devices with buffers of a fixed size ask."""

    @property
    def num_slots(self) -> int:
        """Slots of all cohorts together."""
        return self.num_cohorts * self.slots_per_cohort
