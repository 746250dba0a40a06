"""Bytes that a stage will read, by the headers of its weight files."""

from pathlib import Path

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.rank_cut import RankCut
from stageline_runtime.models.weights.checkpoint import check_shapes
from stageline_runtime.models.weights.stage_weights import checkpoint_form, stage_tensors


def stage_weight_bytes(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    has_embedding: bool,
    has_head: bool,
    dtype: torch.dtype,
    cut: RankCut | None = None,
) -> int:
    """Bytes of the stage's tensors as `dtype`, or of its rank's part of them.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    form = checkpoint_form(model_dir)
    tensors = stage_tensors(config, layer_range, form, has_embedding=has_embedding, has_head=has_head)
    check_shapes(model_dir, {name: tensor.shape for name, tensor in tensors.items()})
    return (cut or RankCut(whole=config)).num_elements(tensors.values()) * dtype.itemsize
