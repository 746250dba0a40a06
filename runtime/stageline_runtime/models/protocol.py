"""What a stage's compute is built from and what it offers to the stage loop, whatever the model family or device.

One hidden tensor goes in and one comes out: the residual stream, already summed. A model may offer to run its layers
captured as graphs. Nothing here knows about transports, plans in flight or sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import GraphMode, SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import rows_per_cohort

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What one stage holds and how large its buffers are: decided once by the engine, the same for all that load."""

    layers: LayerRange
    is_first: bool
    is_last: bool
    dtype: torch.dtype
    num_cohorts: int
    num_slots: int
    slot_tokens: int
    """Capacity of one slot in tokens."""
    num_blocks: int = 0
    """Blocks of the KV cache that it is made with, at load; 0: enough for all slots."""
    max_step_tokens: int = 512
    """Most tokens of a plan, padding included."""

    @property
    def rows_per_cohort(self) -> int:
        """Most requests that decode in one plan."""
        return rows_per_cohort(self.num_slots, self.num_cohorts)


LoadProgress = Callable[[int, int], None]
"""Told the bytes of weights read so far, and those of all that the stage reads."""

Indices = TypeVar("Indices")
"""What a model derives from a plan for its layers; opaque to the stage loop."""


class StageCompute(Protocol[Indices]):
    """Embedding, layers and head of one stage; a stage calls only the parts it holds, in torch's inference mode."""

    def reserve_cache(self, num_blocks: int) -> None:
        """Reallocate the KV cache with `num_blocks` blocks for all slots. Call it before graphs are captured."""

    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Take what a plan says of the slots' blocks, before its rows are looked up."""

    def step_batch(self, plan: StepPlan) -> Indices:
        """Derive from the plan what its layers need, once per plan."""

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
    """Growth of the device's memory."""


@runtime_checkable
class CutsHead(Protocol):
    """A last stage's model that can compute the head's logits in parts, one for each of its ranks."""

    @property
    def first_token(self) -> int:
        """The lowest token id of this rank's part."""

    def head_part(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, hidden_size]` to logits `[num_rows, tokens of the part]` in the weights' dtype."""

    def whole_head(self, part: torch.Tensor) -> torch.Tensor:
        """What `head` gives, from each rank's part of it."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A stage's model with `layers` that can run captured, in the mode that a plan names."""

    def capture_graphs(self, graphs: GraphMode, sizes: CaptureSizes, progress: CaptureProgress) -> CaptureReport:
        """Capture what plans up to `graphs` need, before the stage says that it has loaded; touches no slot.

        Raises:
            GraphsUnavailableError: this model or machine can't.
        """
