"""What a stage's compute is built from and what it offers to the stage loop, whatever the model family or device.

One hidden tensor goes in and one comes out: the residual stream, already summed. A model may offer to run its layers
captured as graphs. Nothing here knows about transports, plans in flight or sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import GraphMode, StepPlan

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What one stage holds and how large its buffers are: decided once by the engine, the same for all that load."""

    layers: LayerRange
    is_first: bool
    is_last: bool
    dtype: torch.dtype
    num_cohorts: int
    slots_per_cohort: int
    slot_tokens: int
    """Capacity of one slot in tokens."""
    num_blocks: int = 0
    """Blocks (`step_plan.blocks_of`) of all slots together, at most; 0: as many as they could. For paged caches."""
    max_step_tokens: int = 512
    """Most tokens of a plan, padding included; only devices with buffers of a fixed size ask."""

    @property
    def num_slots(self) -> int:
        return self.num_cohorts * self.slots_per_cohort


LoadProgress = Callable[[int, int], None]
"""Told the bytes of weights read so far, and those of all that the stage reads."""

Indices = TypeVar("Indices")
"""What a model derives from a plan for its layers; opaque to the stage loop."""


class StageCompute(Protocol[Indices]):
    """Embedding, layers and head of one stage; a stage calls only the parts it holds, in torch's inference mode."""

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

    def __call__(self, model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> StageModel:
        """Load what the stage holds and reserve its KV cache."""


CaptureProgress = Callable[[str], None]
"""Called with a sentence before each part of the capture."""


class GraphsUnavailableError(Exception):
    """The graphs asked for can't be had for this model on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """Token counts of plans that capturing must provide for."""

    decode: tuple[int, ...]
    """Padded sizes of plans of single-token rows."""
    step: tuple[int, ...]
    """Padded sizes of other plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    graphs: int
    seconds: float
    memory_bytes: int
    """Growth of the process's resident memory, or of the device's."""


@runtime_checkable
class PagesCache(Protocol):
    """A stage's model whose cache is made of blocks, as many as there is memory for once the weights are in place."""

    def reserve_cache(self, num_blocks: int) -> None:
        """Make the cache anew, of `num_blocks` blocks for all slots together. Before graphs are captured."""


@runtime_checkable
class CutsHead(Protocol):
    """A stage's model whose head's logits can be had in parts, where its ranks have one each. Last stage only."""

    @property
    def first_token(self) -> int:
        """The lowest token id of this rank's part."""

    def head_part(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, hidden_size]` to logits `[num_rows, tokens of the part]` in the weights' dtype."""

    def whole_head(self, part: torch.Tensor) -> torch.Tensor:
        """What `head` gives, from each rank's part of it."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A stage's model whose `layers` can run captured, in the mode that a plan names."""

    def capture_graphs(
        self, graphs: GraphMode, sizes: CaptureSizes, cache_dir: Path, progress: CaptureProgress
    ) -> CaptureReport:
        """Capture what plans up to `graphs` need, before the stage says that it has loaded; touches no slot.

        Raises:
            GraphsUnavailableError: this model or machine can't.
        """
