"""What a stage on a device takes of its memory, measured before it has a cache to speak of.

Its largest step is run once, by the runner that all later ones go through, with peers that aren't there, so that
nothing that computes is left out: layers, logits, every kind of sampling, drafts where there are some, and what a draft
model does after it. A CPU would take minutes for such a step of a large model, so there it is counted from shapes, by
the engine (`planning.memory.LargestStep`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

import torch
from torch import Tensor

from stageline_api.engine_http import MAX_TOP_LOGPROBS
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import StageModel, StageShape
from stageline_runtime.plan_bus.messages import (
    GraphMode,
    PlanRow,
    RequestSampling,
    SampledRow,
    SlotBlocks,
    SlotFill,
    StepPlan,
)
from stageline_runtime.plan_bus.step_plan import blocks_of, captured_step, padded_size
from stageline_runtime.planning.memory import report_rows
from stageline_runtime.stage.step.drafter import Drafter
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.telemetry.state_clock import State

_COSTLIEST: Final = RequestSampling(
    temperature=1.0,
    top_p=0.9,
    min_p=0.001,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    num_top_logprobs=MAX_TOP_LOGPROBS,
)
DRAFT_STEPS: Final = 2
"""Of a draft model: those after the second take what that takes."""
_COSTLIEST_AT_ONCE: Final = RequestSampling(temperature=1.0, top_p=0.9, min_p=0.001, num_top_logprobs=20)
"""With drafts: a request draws one token after another if its history changes its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    held_bytes: int
    """By loading."""
    step_bytes: int
    """The most that the largest step takes beyond that; with graphs, the pool that they keep is in it."""


class MeasuredDraft(Protocol):
    """A stage's draft model, with a cache that holds at least `blocks_to_measure` blocks."""

    def drafter(self) -> Drafter:
        """One that knows no slot yet."""

    def run_layers(self) -> None:
        """Run its layers alone for the largest step that is captured."""


def largest_plan(shape: StageShape, vocab_size: int, *, samples: bool, draft_steps: int = 0) -> StepPlan:
    """The plan with most tokens: divided among as many slots as there are, each `samples` in the costliest way. After
    it, with `draft_steps`, a draft model catches up with all of them.
    """
    counts = _row_tokens(shape)
    prompts = [tuple(index % vocab_size for index in range(count)) for count in counts]
    rows = tuple(
        PlanRow(
            slot,
            1,
            0,
            len(ids),
            ids,
            need_sample=samples,
            report_targets=ids if samples else (),
            report_top=MAX_TOP_LOGPROBS,
            wants_drafts=draft_steps > 0,
        )
        for slot, ids in enumerate(prompts)
    )
    return _plan_of(shape, 0, rows, tuple(SlotFill(row.slot, 1, _COSTLIEST) for row in rows), draft_steps)


def captured_shape(shape: StageShape) -> StageShape:
    """The same with no larger steps than those that are captured."""
    largest = max(captured_step(shape.max_step_tokens), padded_size(shape.rows_per_cohort))
    return replace(shape, max_step_tokens=min(shape.max_step_tokens, largest))


def verifying_plan(shape: StageShape, drafts: int, newest: Sequence[SampledRow]) -> StepPlan:
    """The plan with most draws, behind a row of one token in each slot: up to `drafts` more for each `newest`."""
    rows = tuple(
        PlanRow(row.slot, 1, 1, count, (row.token,) * count, need_sample=True, num_drafts=count - 1)
        for row, tokens in zip(newest, _row_tokens(shape), strict=True)
        if (count := min(tokens, drafts + 1, shape.slot_tokens - 1))
    )
    return _plan_of(shape, 1, rows)


def _opening_plan(shape: StageShape, sampling: RequestSampling = _COSTLIEST_AT_ONCE, draft_steps: int = 0) -> StepPlan:
    """One token in each slot; after it, with `draft_steps`, a draft model draws for all of them."""
    rows = tuple(
        PlanRow(slot, 1, 0, 1, (0,), need_sample=True, wants_drafts=draft_steps > 0)
        for slot in range(len(_row_tokens(shape)))
    )
    return _plan_of(shape, 0, rows, tuple(SlotFill(row.slot, 1, sampling) for row in rows), draft_steps)


def _plan_of(
    shape: StageShape, seq: int, rows: tuple[PlanRow, ...], fills: tuple[SlotFill, ...] = (), draft_steps: int = 0
) -> StepPlan:
    return StepPlan(
        seq=seq,
        cohort=0,
        fills=fills,
        rows=rows,
        padded_tokens=padded_size(sum(row.num_tokens for row in rows)),
        feedback_through=-1,
        feedback_posted=False,
        dummy=False,
        tables=_tables(shape, rows, draft_steps),
        draft_steps=draft_steps,
    )


def _tables(shape: StageShape, rows: tuple[PlanRow, ...], draft_steps: int) -> tuple[SlotBlocks, ...]:
    """Blocks for all positions of the rows and of the drafts behind them, slot after slot."""
    ends = [min(row.position + row.num_tokens + draft_steps, shape.slot_tokens) for row in rows]
    counts = [blocks_of(end) for end in ends]
    starts = accumulate(counts, initial=0)
    return tuple(
        SlotBlocks(row.slot, 0, tuple(range(start, start + count)))
        for row, start, count in zip(rows, starts, counts, strict=False)
    )


def blocks_to_measure(shape: StageShape) -> int:
    """Blocks of KV cache that the largest plan writes, including drafted or verified positions behind it."""
    return sum(blocks_of(min(tokens + 1 + DRAFT_STEPS, shape.slot_tokens)) for tokens in _row_tokens(shape))


def _row_tokens(shape: StageShape) -> list[int]:
    """Tokens of each row of the largest plan, by slot."""
    tokens = shape.max_step_tokens
    num_rows = min(shape.num_slots, tokens)
    return [min(tokens // num_rows + (slot < tokens % num_rows), shape.slot_tokens) for slot in range(num_rows)]


class _NoPeers:
    """A transport without peers: received tensors are noise, sent tensors are dropped."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._num_tokens = 0

    def post_hidden(self, seq: int, num_tokens: int) -> None:  # noqa: ARG002 - the protocol's
        self._num_tokens = num_tokens

    def hidden_has_come(self, seq: int) -> bool:  # noqa: ARG002 - the protocol's
        return True

    def wait_hidden(self, seq: int) -> Tensor:  # noqa: ARG002 - the protocol's
        return torch.randn(self._num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Nobody is there."""

    def would_block(self) -> bool:
        return False

    def check(self, seq: int) -> None:
        """Nobody is there."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """None is asked for."""

    def wait_feedback(self, seq: int) -> Tensor:
        raise AssertionError(f"plan {seq}: no plan here has feedback")

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        raise AssertionError(f"plan {seq}: no plan here has feedback of {len(rows)} rows")


class _NobodyWatches:
    def enter(self, state: State, operation: str = "") -> None:
        """States of these steps are not recorded."""

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """Loading has a limit of its own."""

    def rest(self) -> None:
        """Nothing was watched."""


@torch.inference_mode()  # as the loop that serves
def measure(
    model: StageModel,
    config: ModelConfig,
    shape: StageShape,
    graphs: GraphMode,
    device: Accelerator,
    *,
    drafts: int = 0,
    draft: MeasuredDraft | None = None,
) -> MemoryUse:
    """What the loaded `model` takes of `device`; its cache holds at least `blocks_to_measure` blocks.

    `drafts`: most of a row. `draft`: on a stage with a draft model, which is loaded too.
    """

    def run_largest(step_shape: StageShape, *, samples: bool) -> None:
        runner = _runner(model, config, shape, device)
        _run(runner, largest_plan(step_shape, config.vocab_size, samples=samples))
        device.synchronize()

    def verify() -> None:
        runner = _runner(model, config, shape, device)
        newest = _run(runner, _opening_plan(shape))
        _run(runner, verifying_plan(shape, drafts, newest))
        device.synchronize()

    def draft_after(plan: StepPlan, drafter: Drafter) -> None:
        runner = _runner(model, config, shape, device, drafter)
        _run(runner, plan)
        drafts = runner.draft(plan)
        assert drafts is not None, "it was asked for some"
        drafts.drafted()
        device.synchronize()
        drafter.forget()

    captured = device.peak_bytes(lambda: run_largest(captured_shape(shape), samples=False))
    step = device.peak_bytes(lambda: run_largest(shape, samples=True))
    if drafts and shape.is_last:
        step = max(step, device.peak_bytes(verify))
    if draft is not None:
        # Most tokens that it catches up with, and most rows that it draws for: a draw after each of them.
        catching_up = largest_plan(shape, config.vocab_size, samples=True, draft_steps=DRAFT_STEPS)
        for plan in (catching_up, _opening_plan(shape, _COSTLIEST, DRAFT_STEPS)):
            step = max(step, device.peak_bytes(partial(draft_after, plan, draft.drafter())))
    if graphs is not GraphMode.OFF:
        # Graphs keep what the layers take at once in a pool of their own, for the largest that is captured.
        step += captured + (0 if draft is None else device.peak_bytes(draft.run_layers))
    return MemoryUse(held_bytes=device.allocated_bytes(), step_bytes=step)


def _runner(
    model: StageModel, config: ModelConfig, shape: StageShape, device: Accelerator, drafter: Drafter | None = None
) -> StageRunner:
    return StageRunner(
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
        device=device,
        drafter=drafter,
        report_rows=report_rows(config.vocab_size),
    )


def _run(runner: StageRunner, plan: StepPlan) -> Sequence[SampledRow]:
    """Run a plan; what it sampled, once the device is done."""
    runner.accept(plan)
    return runner.run(plan).rows()
