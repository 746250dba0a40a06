"""Loads the model that the last stage drafts with: whole, beside the stage's layers, on the same device.

Its cache is allocated twice, like the stage's: for its largest step, and then for the group's blocks. The size of each
block that the engine allocates includes the draft model's keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_api.runtime_config import LayerRange
from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.families import build_any_stage_model, device_builder
from stageline_runtime.models.layers.attention import Attention, AttentionHeads
from stageline_runtime.models.protocol import (
    CaptureProgress,
    CaptureReport,
    CapturesGraphs,
    CaptureSizes,
    LoadProgress,
    ModelBuilder,
    StageShape,
)
from stageline_runtime.plan_bus.messages import GraphMode
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.stage.memory_use import captured_shape, largest_plan
from stageline_runtime.stage.step.drafter import Drafter, DraftStage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """The draft model with its cache; the drafter that uses it comes when the stage runs plans."""

    stage: DraftStage
    shape: StageShape
    max_step_tokens: int
    vocab_size: int
    """Of the model that it drafts for."""
    token_bytes: int
    """Keys and values of one token."""
    accelerator: Accelerator | None = None

    def drafter(self, graphs: GraphMode = GraphMode.OFF) -> Drafter:
        """A drafter that knows no slot yet; one at a time may use the model. `graphs`: what `capture` returned."""
        return Drafter(
            self.stage,
            num_slots=self.shape.num_slots,
            max_step_tokens=self.max_step_tokens,
            vocab_size=self.vocab_size,
            device=self.accelerator or HOST,
            graphs=graphs,
        )

    @torch.inference_mode()
    def run_layers(self) -> None:
        """As `memory_use.MeasuredDraft`."""
        model = self.stage.model
        plan = largest_plan(captured_shape(self.shape), self.stage.vocab_size, samples=False)
        ids = torch.tensor([token for row in plan.rows for token in row.token_ids])
        padded = F.pad(ids, (0, plan.padded_tokens - len(ids)))
        assert self.accelerator is not None, "a CPU measures nothing"
        model.change_tables(plan.tables)
        model.layers(model.embed(self.accelerator.place(padded)), model.step_batch(plan))

    def make_cache(self, num_blocks: int) -> int:
        """Make its cache for the group's `num_blocks` blocks; returns its bytes.

        Raises:
            RuntimeError: there is no room for it.
        """
        self.stage.model.reserve_cache(num_blocks)
        return num_blocks * BLOCK_TOKENS * self.token_bytes

    def capture(
        self, graphs: GraphMode, sizes: CaptureSizes, progress: CaptureProgress
    ) -> tuple[GraphMode, CaptureReport]:
        """Capture its layers up to `graphs`, for the `sizes` of the group's plans; behind `make_cache`.

        Returns what its steps may ask for: nothing on a CPU, where compiling them would take longer than it wins.

        Raises:
            GraphsUnavailableError: it can't be captured.
        """
        model = self.stage.model
        if graphs is GraphMode.OFF or self.accelerator is None:
            return GraphMode.OFF, CaptureReport(graphs=0, seconds=0.0, memory_bytes=0)
        assert isinstance(model, CapturesGraphs), "a device's model may be captured"
        return graphs, model.capture_graphs(graphs, sizes, progress)


def load_draft(
    draft_dir: Path,
    draft: ModelConfig,
    model: ModelConfig,
    shape: StageShape,
    progress: LoadProgress,
    *,
    max_step_tokens: int,
    accelerator: Accelerator | None = None,
    attention: Callable[[AttentionHeads], Attention] | None = None,
) -> LoadedDraft:
    """Load `draft` for the stage of `shape` of `model`, with a slot for each of the group's.

    Raises:
        RuntimeError: there is no room for it.
        RuntimeFailure: class BadConfig, a device can't run it.
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    context_tokens = min(shape.slot_tokens, draft.context_length)
    whole = replace(
        shape,
        layers=LayerRange(first=0, last=draft.num_layers - 1),
        is_first=True,
        is_last=True,
        slot_tokens=context_tokens,
    )
    build: ModelBuilder = build_any_stage_model if accelerator is None else device_builder(accelerator, attention)
    loaded = build(draft_dir, draft, whole, progress)
    return LoadedDraft(
        stage=DraftStage(model=loaded, vocab_size=draft.vocab_size, context_tokens=context_tokens),
        shape=whole,
        max_step_tokens=max_step_tokens,
        vocab_size=model.vocab_size,
        token_bytes=draft.kv_bytes_per_token(draft.num_layers, shape.dtype.itemsize),
        accelerator=accelerator,
    )
