"""Which code runs a model on a device: the own decoder, for its families alone."""

from collections.abc import Callable
from pathlib import Path

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.device.attention import AttentionHeads, DeviceAttention
from stageline_runtime.models.device.stage import DeviceStage, attention_heads, build_device_stage
from stageline_runtime.models.protocol import ModelBuilder
from stageline_runtime.models.stage_shape import StageShape
from stageline_runtime.models.weights.stage_weights import Progress
from stageline_runtime.termination import RuntimeFailure


def device_builder(
    accelerator: Accelerator, attention: Callable[[AttentionHeads], DeviceAttention] | None = None
) -> ModelBuilder:
    """A builder for `accelerator`; `attention` None takes the Triton kernels.

    The builder raises RuntimeFailure of class BadConfig for a model that only Hugging Face's layers can run: these
    run on the CPU alone.
    """

    def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: Progress) -> DeviceStage:
        if config.is_covered:
            detail = (
                f"model_type {config.architecture} runs through Hugging Face's layers, and these on the CPU only; "
                "set spec.engine.device to cpu"
            )
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="load")
        chosen = None if attention is None else attention(attention_heads(config, shape))
        return build_device_stage(model_dir, config, shape, progress, accelerator, chosen)

    return build
