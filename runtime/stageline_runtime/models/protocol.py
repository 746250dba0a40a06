"""What a stage's compute offers to the stage loop, whatever the model family or device.

One hidden tensor goes in and one comes out: the residual stream, already summed. Nothing here knows about transports,
plans in flight or sampling.
"""

from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.stage_shape import StageShape
from stageline_runtime.models.weights.stage_weights import Progress
from stageline_runtime.plan_bus.messages import StepPlan

Indices = TypeVar("Indices")
"""What a model derives from a plan for its layers; opaque to the stage loop."""


class StageCompute(Protocol[Indices]):
    """Embedding, layers and head of one stage; a stage calls only the parts it holds."""

    def attention_batch(self, plan: StepPlan) -> Indices:
        """Derive positions, slots and masks from the plan, once per plan."""

    def reset_slot(self, slot: int, keep_tokens: int = 0) -> None:
        """Forget what a slot holds from position `keep_tokens` on, when a new request takes it."""

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` keys and values of one slot to another, which has been reset."""

    def trim_slot(self, slot: int, num_tokens: int) -> None:
        """Forget what a slot holds from position `num_tokens` on, and give its memory back."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids `[num_tokens]` int64 to hidden `[num_tokens, hidden_size]`. First stage only."""

    def layers(self, hidden: torch.Tensor, batch: Indices) -> torch.Tensor:
        """Run the stage's layers: hidden `[padded_tokens, hidden_size]` in, the same shape out; writes KV."""

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`. Last stage only."""


StageModel = StageCompute[Any]


class ModelBuilder(Protocol):
    """Makes a stage's model; the pipeline benchmark gives a stage one that only takes time."""

    def __call__(self, model_dir: Path, config: ModelConfig, shape: StageShape, progress: Progress) -> StageModel:
        """Load what the stage holds and reserve its KV cache."""
