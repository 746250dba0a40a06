"""A real stage process with layers that take a fixed time instead of computing: it measures scheduler and transport.

`python -m stageline_bench.runtime.group.paced_stage SECONDS_PER_STEP SECONDS_PER_TOKEN`, under the pod contract. Only
the model is replaced: bus, plans, transport, feedback, clock and sampling are the stage's own. It sleeps, so that
stages and engine need no core each; a late wake-up counts as compute. Not available in `stageline`.
"""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from stageline_runtime.contract import read_contract
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.layers.step_batch import BatchBounds, StepBatch, build_step_batch
from stageline_runtime.models.protocol import LoadProgress, ModelBuilder, StageModel, StageShape
from stageline_runtime.plan_bus.messages import SlotBlocks, StepPlan
from stageline_runtime.stage.process import StageProcess
from stageline_runtime.termination import RuntimeFailure, write_last_words


class PacedModel:
    """Implements `StageModel`; every token sampled from it is 0."""

    def __init__(
        self, config: ModelConfig, shape: StageShape, seconds_per_step: float, seconds_per_token: float
    ) -> None:
        self._config = config
        self._shape = shape
        self._bounds = BatchBounds(num_slots=shape.num_slots, slot_tokens=shape.slot_tokens)
        self._seconds_per_step = seconds_per_step
        self._seconds_per_token = seconds_per_token

    def step_batch(self, plan: StepPlan) -> StepBatch:
        """The real one: its cost belongs to the step's overhead."""
        return build_step_batch(plan.rows, plan.padded_tokens, self._bounds)

    def reserve_cache(self, num_blocks: int) -> None:
        """There is no cache."""

    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """There is no cache."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Zeros `[num_tokens, hidden_size]`."""
        return torch.zeros(len(token_ids), self._config.hidden_size, dtype=self._shape.dtype)

    def layers(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Hidden `[padded_tokens, hidden_size]`, unchanged, after the step's time."""
        time.sleep(self._seconds_per_step + self._seconds_per_token * len(hidden))
        return hidden

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` that prefer token 0."""
        return torch.zeros(len(hidden_rows), self._config.vocab_size)


def paced_model_builder(seconds_per_step: float, seconds_per_token: float) -> ModelBuilder:
    """A builder that reads no weights."""

    def build(
        model_dir: Path,  # noqa: ARG001 - the builder's signature
        config: ModelConfig,
        shape: StageShape,
        progress: LoadProgress,  # noqa: ARG001
    ) -> StageModel:
        return PacedModel(config, shape, seconds_per_step, seconds_per_token)

    return build


def main() -> None:
    """Run a paced stage until the engine ends it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    seconds_per_step, seconds_per_token = map(float, sys.argv[1:])
    try:
        contract = read_contract()
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))
    sys.exit(StageProcess(contract, paced_model_builder(seconds_per_step, seconds_per_token)).run())


if __name__ == "__main__":
    main()
