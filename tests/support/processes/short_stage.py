"""A stage that believes in a small machine: `python short_stage.py NUM_BLOCKS`, under the pod contract.

Only the report of available memory is replaced: so much that weights and the largest step of all stages, wherever they
are cut, leave room for `NUM_BLOCKS` blocks of KV cache in float32. A group with a tiny model runs out of it as a large
one does.
"""

import logging
import sys
from pathlib import Path
from unittest import mock

from oracles.planning_models import weight_bytes
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.contract import read_contract
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.memory import USABLE_SHARE, LargestStep, draft_memory
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.stage.process import StageProcess

FLOAT32_BYTES = 4


def available_bytes(config: RuntimeConfig, num_blocks: int) -> int:
    """What a machine of two stages has available."""
    model = read_model_config(prepared_model_dir(config.source, Path(config.cache_dir)))
    ranges = (LayerRange(first=0, last=0), LayerRange(first=1, last=model.num_layers - 1))
    taken = num_blocks * BLOCK_TOKENS * model.kv_bytes_per_token(model.num_layers, FLOAT32_BYTES)
    for stage, layers in enumerate(ranges):
        taken += weight_bytes(model, layers, is_first=stage == 0, is_last=stage == 1, element_bytes=FLOAT32_BYTES)
        taken += LargestStep.of(config, on_gpus=False).bytes_of(model, is_last=stage == 1, element_bytes=FLOAT32_BYTES)
    if config.speculative is not None and config.speculative.draft_source is not None:
        draft = read_model_config(prepared_model_dir(config.speculative.draft_source, Path(config.cache_dir)))
        held = draft_memory(draft, LargestStep.of(config, on_gpus=False), FLOAT32_BYTES)
        own_step = LargestStep.of(config, on_gpus=False).bytes_of(model, is_last=True, element_bytes=FLOAT32_BYTES)
        taken += held.weight_bytes + max(0, held.step_bytes - own_step)
        taken += num_blocks * BLOCK_TOKENS * held.token_bytes
    return int(taken / USABLE_SHARE) + 16


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    contract = read_contract()
    available = available_bytes(contract.config, int(sys.argv[1]))
    with mock.patch("stageline_runtime.stage.handshake.available_bytes", return_value=available):
        sys.exit(StageProcess(contract).run())


if __name__ == "__main__":
    main()
