"""The last stage's end: the final norm, then logits over the vocabulary, on whatever device the weights are."""

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.linear import Linear
from stageline_runtime.models.cpu.normalization import RmsNorm
from stageline_runtime.models.native.row_kernels import RowKernels
from stageline_runtime.models.weights.stage_weights import StageWeights


class OutputHead:
    """Reads its own weights, except a matrix that the stage already holds as its `embedding`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StageWeights,
        embedding: torch.Tensor | None,
        kernels: RowKernels | None = None,
    ) -> None:
        self._final_norm = RmsNorm(weights.final_norm(), config.rms_norm_eps, kernels)
        self._to_vocabulary = Linear(weights.head(embedding))

    def __call__(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map hidden `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`."""
        return self._to_vocabulary(self._final_norm(hidden_rows)).to(torch.float32)
