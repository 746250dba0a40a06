"""One stage of a model that Hugging Face's own layers compute: the coverage path, and the own decoder's oracle.

Any decoder-only model with a `base_model_pp_plan` runs here, slower than in the own decoder but with the same cache,
plans and hidden tensor. What can't be exact is refused when the stage loads: a step of one token is run to see what
its layers ask of attention.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.coverage.attention import CURRENT_STEP, CoverageError, CoveredStep
from stageline_runtime.models.coverage.cut import ModelCut, Passage, load_cut
from stageline_runtime.models.layers.kv_cache import make_cache
from stageline_runtime.models.layers.step_batch import (
    BatchBounds,
    BlockTable,
    StepBatch,
    StepTable,
    build_step_batch,
)
from stageline_runtime.models.protocol import LoadProgress, StageShape
from stageline_runtime.plan_bus.messages import PlanRow, SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of

_PROBE = PlanRow(slot=0, generation=0, position=0, num_tokens=1, token_ids=(0,), need_sample=False)
_FOREIGN_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, NotImplementedError)
"""What a model's own code raises where it asks its cache or its layers for something that isn't here."""


class _NoCache:
    """Given to the model in place of its own cache: it makes masks for single requests, and keeps nothing."""

    is_compileable = False

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0

    def get_query_offset(self, _layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, _layer: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_arguments: object, **_named: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


class CoveredStage:
    """A `StageModel` over Hugging Face's layers."""

    def __init__(self, config: ModelConfig, cut: ModelCut, shape: StageShape) -> None:
        self._cut = cut
        self._config = config
        self._shape = shape
        self._bounds = BatchBounds(num_slots=shape.num_slots, slot_tokens=shape.slot_tokens)
        self.reserve_cache(shape.num_blocks or shape.num_slots * blocks_of(shape.slot_tokens))

    def reserve_cache(self, num_blocks: int) -> None:
        """Reallocate the cache with `num_blocks` blocks; its contents are lost."""
        shape = self._shape
        self._caches = make_cache(self._config, shape, num_blocks)
        self._blocks = BlockTable(num_slots=shape.num_slots, slot_tokens=shape.slot_tokens, num_blocks=num_blocks)
        self._table = StepTable(shape.max_step_tokens, self._blocks)

    @torch.inference_mode()
    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Apply what a plan says of the slots' blocks."""
        self._blocks.change(changes)

    def step_batch(self, plan: StepPlan) -> StepBatch:
        """The plan's table; raises BusProtocolError where a row lies outside its slot."""
        batch = build_step_batch(plan.rows, plan.padded_tokens, self._bounds)
        self._blocks.check(plan.rows)
        return batch

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._cut.passage = passage = Passage(embedding_only=True, hidden=None)
        positions = torch.zeros_like(token_ids)
        self._cut.base(
            input_ids=token_ids[None], position_ids=positions[None], past_key_values=_NoCache(), use_cache=False
        )
        assert passage.hidden is not None, "the model has no layers"
        return passage.hidden[0]

    @torch.inference_mode()
    def layers(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self._run(hidden, self._step(batch))
        return self._cut.passage.layer_outputs[-1][0]

    @torch.inference_mode()
    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        rows = hidden_rows[None]
        for module in self._cut.tail:
            rows = module(rows)
        self._cut.last_hidden.rows = rows
        logits: torch.Tensor = self._cut.model(inputs_embeds=rows, use_cache=False).logits
        return logits[0].to(torch.float32)

    @torch.inference_mode()
    def probe(self, dtype: torch.dtype) -> None:
        """Run one token through the layers, to find out now what they ask for.

        Raises:
            CoverageError: they ask for something that isn't built.
        """
        step = self._step(build_step_batch((_PROBE,), 1, self._bounds))
        hidden = torch.zeros(1, self._config.hidden_size, dtype=dtype)
        try:
            if self._cut.is_first:
                hidden = self.embed(torch.zeros(1, dtype=torch.int64))
            self._run(hidden, step)
            if self._cut.is_last:
                self.head(hidden)
        except _FOREIGN_ERRORS as error:
            name = type(self._cut.model).__name__
            raise CoverageError(f"{name} can't be run over slots: {type(error).__name__}: {error}") from error
        expected = list(range(step.first_layer, step.first_layer + len(step.caches)))
        if step.calls != expected:
            raise CoverageError(
                f"{type(self._cut.model).__name__} is not supported: attention ran in layers {step.calls}, "
                f"not once in each of {expected}"
            )

    def _step(self, batch: StepBatch) -> CoveredStep:
        tensors = self._table.fill(batch)
        return CoveredStep(step=tensors, caches=self._caches, first_layer=self._shape.layers.first)

    def _run(self, hidden: torch.Tensor, step: CoveredStep) -> None:
        self._cut.passage = Passage(embedding_only=False, hidden=hidden[None])
        token = CURRENT_STEP.set(step)
        try:
            self._cut.base(
                inputs_embeds=hidden[None],
                position_ids=step.step.tokens[None, :, 1].long(),
                past_key_values=_NoCache(),
                use_cache=False,
            )
        finally:
            CURRENT_STEP.reset(token)


def build_covered_stage(
    model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress
) -> CoveredStage:
    """Load a stage's part of a Hugging Face model and reserve its KV cache.

    Raises:
        WeightsError: a tensor is missing or misshapen, a file is unreadable, or the model can't be run exactly.
    """
    cut = load_cut(
        model_dir, shape.layers, is_first=shape.is_first, is_last=shape.is_last, dtype=shape.dtype, progress=progress
    )
    stage = CoveredStage(config, cut, shape)
    stage.probe(shape.dtype)
    return stage
