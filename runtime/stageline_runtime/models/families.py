"""Which code runs a model: the own decoder for its families, Hugging Face's layers for all others."""

from pathlib import Path

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.decoder import build_stage_model
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.models.stage_shape import StageShape
from stageline_runtime.models.weights.stage_weights import Progress


def build_any_stage_model(model_dir: Path, config: ModelConfig, shape: StageShape, progress: Progress) -> StageModel:
    """Load what a stage holds of any supported model and reserve its KV cache.

    Raises:
        WeightsError: a tensor is missing or misshapen, a file is unreadable, or the model can't be run exactly.
    """
    if config.is_covered:
        from stageline_runtime.models.coverage.stage import build_covered_stage  # only covered models need transformers

        return build_covered_stage(model_dir, config, shape, progress)
    return build_stage_model(model_dir, config, shape, progress)
