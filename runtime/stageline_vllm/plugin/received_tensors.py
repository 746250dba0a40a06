"""The entry point `vllm.general_plugins` that creates a later stage's receive tensors where vLLM omits them.

vLLM 0.32 makes them in the run that warms up a compiled model. A CPU's runner omits that run without compilation:
with `--enforce-eager`, and with LoRA adapters. The first step of a later stage then fails an assertion. This plugin
makes them as vLLM does, just before they are used, and only if there are none.
"""

import functools
import os
from typing import Any

from stageline_vllm.worker_state import DIRECTORY_VARIABLE


def register() -> None:
    """Called by vLLM, in each of its processes and maybe more than once."""
    if not os.environ.get(DIRECTORY_VARIABLE):
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    give_tensors(GPUModelRunner)


def give_tensors(runner: Any) -> None:
    """Patch a class of runners so that it sets its own tensors; repeated calls have no effect."""
    original = runner.sync_and_gather_intermediate_tensors
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = with_tensors
