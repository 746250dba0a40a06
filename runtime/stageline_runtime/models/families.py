"""Which code runs a model: the own decoder for its families, Hugging Face's layers for all others."""

from pathlib import Path

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.decoder import build_stage_model
from stageline_runtime.models.protocol import ModelBuilder, StageModel
from stageline_runtime.models.weights import Progress


def build_any_stage_model(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    num_cohorts: int,
    slots_per_cohort: int,
    slot_tokens: int,
    progress: Progress,
) -> StageModel:
    """Load what a stage holds of any supported model and reserve its KV cache.

    Raises:
        WeightsError: a tensor is missing or misshapen, a file is unreadable, or the model can't be run exactly.
    """
    build: ModelBuilder = build_stage_model
    if config.is_covered:
        from stageline_runtime.models.coverage import build_covered_stage  # only covered models need transformers

        build = build_covered_stage
    return build(
        model_dir,
        config,
        layer_range,
        is_first=is_first,
        is_last=is_last,
        dtype=dtype,
        num_cohorts=num_cohorts,
        slots_per_cohort=slots_per_cohort,
        slot_tokens=slot_tokens,
        progress=progress,
    )
