"""What a stage on a device takes of its memory, measured before it has a cache to speak of.

Its largest step is run once, by the runner that all later ones go through, with peers that aren't there, so that
nothing that computes is left out: layers, logits, every kind of sampling. A CPU would take minutes for such a step of a
large model, so there it is counted from shapes, by the engine (`planning.memory.LargestStep`).
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import StageModel, StageShape
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of, padded_size
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.telemetry.state_clock import State

_COSTLIEST: Final = RequestSampling(
    temperature=1.0, top_p=0.9, min_p=0.001, repetition_penalty=1.1, frequency_penalty=0.1, num_top_logprobs=20
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    held_bytes: int
    """By loading."""
    step_bytes: int
    """The most that the largest step takes beyond that; with graphs, the pool that they keep is in it."""


def largest_plan(shape: StageShape, vocab_size: int, *, samples: bool) -> StepPlan:
    """The plan with most tokens: divided among as many slots as there are, each `samples` in the costliest way."""
    counts = _row_tokens(shape)
    rows = tuple(
        PlanRow(slot, 1, 0, count, tuple(index % vocab_size for index in range(count)), need_sample=samples)
        for slot, count in enumerate(counts)
    )
    return StepPlan(
        seq=0,
        cohort=0,
        fills=tuple(SlotFill(row.slot, 1, _COSTLIEST) for row in rows),
        rows=rows,
        padded_tokens=padded_size(sum(counts)),
        feedback_through=-1,
        feedback_posted=False,
        dummy=False,
    )


def blocks_to_measure(shape: StageShape) -> int:
    """Blocks of KV cache that the largest plan writes."""
    return sum(map(blocks_of, _row_tokens(shape)))


def _row_tokens(shape: StageShape) -> list[int]:
    """Tokens of each row of the largest plan, by slot."""
    tokens = shape.max_step_tokens
    num_rows = min(shape.num_slots, tokens)
    return [min(tokens // num_rows + (slot < tokens % num_rows), shape.slot_tokens) for slot in range(num_rows)]


class _NoPeers:
    """A transport to nobody: what would come is noise, what would go is dropped."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._num_tokens = 0

    def post_hidden(self, seq: int, num_tokens: int) -> None:  # noqa: ARG002 - the protocol's
        self._num_tokens = num_tokens

    def wait_hidden(self, seq: int) -> Tensor:  # noqa: ARG002 - the protocol's
        return torch.randn(self._num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Nobody is there."""

    def would_block(self) -> bool:
        return False

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """None is asked for."""

    def wait_feedback(self, seq: int) -> Tensor:
        raise AssertionError(f"plan {seq}: no plan here has feedback")

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        raise AssertionError(f"plan {seq}: no plan here has feedback of {len(rows)} rows")

    def close(self) -> None:
        """Nothing to let go of."""


class _NobodyWatches:
    def enter(self, state: State, operation: str = "") -> None:
        """No state of these steps is told."""

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """Loading has a limit of its own."""

    def rest(self) -> None:
        """Nothing was watched."""


def measure(
    model: StageModel, config: ModelConfig, shape: StageShape, graphs: GraphMode, device: Accelerator
) -> MemoryUse:
    """What the loaded `model` takes of `device`; its cache holds at least `blocks_to_measure` blocks."""
    layers = device.peak_bytes(lambda: _run_largest(model, config, shape, device, samples=False))
    step = device.peak_bytes(lambda: _run_largest(model, config, shape, device, samples=True))
    # Graphs keep what the layers take at once in a pool of their own, for the largest that is captured.
    pool = 0 if graphs is GraphMode.OFF else layers
    return MemoryUse(held_bytes=device.allocated_bytes(), step_bytes=step + pool)


def _run_largest(
    model: StageModel, config: ModelConfig, shape: StageShape, device: Accelerator, *, samples: bool
) -> None:
    """Run the largest plan; the slots give up what it wrote."""
    plan = largest_plan(shape, config.vocab_size, samples=samples)
    runner = StageRunner(
        model,
        _NoPeers(config.hidden_size, shape.dtype, device.device),
        _NobodyWatches(),
        _NobodyWatches(),
        # Only its ends matter: the first embeds, the last samples.
        stage=0 if shape.is_first else 1,
        stage_count=(0 if shape.is_first else 1) + (1 if shape.is_last else 2),
        num_slots=shape.num_slots,
        hidden_size=config.hidden_size,
        dtype=shape.dtype,
        accelerator=device,
    )
    runner.accept(plan)
    runner.run(plan)
    device.synchronize()
    for row in plan.rows:
        model.trim_slot(row.slot, 0)
