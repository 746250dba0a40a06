"""Machines for `short_stage.py`: what a stage must report for a group to have exactly so many blocks of KV cache."""

from pathlib import Path

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.memory import USABLE_SHARE, weight_bytes

SHORT_STAGE = Path(__file__).with_name("short_stage.py")
FLOAT32_BYTES = 4


def short_stage_command(model_dir: Path, num_blocks: int) -> tuple[str, str]:
    """A stage of two on a machine that holds both in float32, wherever they are cut, and `num_blocks` blocks."""
    config = read_model_config(model_dir)
    first, rest = LayerRange(first=0, last=0), LayerRange(first=1, last=config.num_layers - 1)
    weights = weight_bytes(config, first, is_first=True, is_last=False, element_bytes=FLOAT32_BYTES)
    weights += weight_bytes(config, rest, is_first=False, is_last=True, element_bytes=FLOAT32_BYTES)
    cache = num_blocks * BLOCK_TOKENS * config.kv_bytes_per_token(config.num_layers, FLOAT32_BYTES)
    return str(SHORT_STAGE), str(int((weights + cache) / USABLE_SHARE) + 16)
