"""What a stage's compute offers to the stage loop, whatever the model family or device.

One hidden tensor goes in and one comes out: the residual stream, already summed. Nothing here knows about transports,
plans in flight or sampling.
"""

from pathlib import Path
from typing import Protocol

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.messages import StepPlan
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.attention_batch import AttentionBatch
from stageline_runtime.models.weights import Progress


class StageModel(Protocol):
    """Embedding, layers and head of one stage; a stage calls only the parts it holds."""

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """Derive positions, slots and masks from the plan, once per plan."""

    def reset_slot(self, slot: int) -> None:
        """Forget what a slot holds, when a new request takes it."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids `[num_tokens]` int64 to hidden `[num_tokens, hidden_size]`. First stage only."""

    def layers(self, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the stage's layers: hidden `[padded_tokens, hidden_size]` in, the same shape out; writes KV."""

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`. Last stage only."""


class ModelBuilder(Protocol):
    """Makes a stage's model; the pipeline benchmark gives a stage one that only takes time."""

    def __call__(
        self,
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
        """Load what the stage holds and reserve its KV cache."""
