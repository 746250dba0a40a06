"""From connected stages to a scheduler: the cut is agreed, the stages have loaded, and the ledger has their sizes."""

from typing import Final

from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger

_WARM_UP_TOKENS: Final = 8


async def form_scheduler(group: StageGroup, config: RuntimeConfig, max_waiting: int) -> Scheduler:
    """Form the group and make the scheduler for what its stages hold.

    Raises:
        RuntimeFailure: the group could not be formed.
    """
    size = await group.form()
    return Scheduler(
        SlotLedger.of(size, prefix_cache=config.prefix_cache),
        max_step_tokens=config.max_num_batched_tokens,
        max_waiting=max_waiting,
        graphs=group.graphs,
    )


def warm_up_tokens(config: RuntimeConfig) -> int:
    """Prompt tokens of the plan that warms all stages up."""
    return min(_WARM_UP_TOKENS, config.max_num_batched_tokens)
