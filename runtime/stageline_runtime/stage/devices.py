"""What a stage computes on where that is not the CPU: how it is chosen, what attends there, how its ranks exchange.

A GPU's is the default; tests put a device in its place that is not there, with all that goes with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stageline_runtime.accelerator.cuda import choose_accelerator
from stageline_runtime.accelerator.nccl import NcclRanks
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.layers.attention import Attention, AttentionHeads
from stageline_runtime.ranks.device_ranks import RankBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    choose: Callable[[str], Accelerator | None] = choose_accelerator
    """The device for `spec.engine.device`; None: the CPU."""
    attention: Callable[[AttentionHeads], Attention] | None = None
    """None: the Triton kernels."""
    rank_backend: RankBackend = field(default_factory=NcclRanks)
    """For stages of several ranks."""
