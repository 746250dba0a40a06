"""What a stage on a device says that it takes: its largest step is run, without sampling and with it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.tiny_models import write_tiny_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.decoder import DecoderStage, attention_heads, build_stage_model
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.plan_bus.messages import GraphMode
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, padded_size
from stageline_runtime.stage.load_draft import LoadedDraft, load_draft
from stageline_runtime.stage.memory_use import MemoryUse, blocks_to_measure, largest_plan, measure


class ScriptedMemory(ImmediateAccelerator):
    """A device whose allocator answers as told; notes nothing but that work was done."""

    def __init__(self, *peaks: int) -> None:
        super().__init__()
        self.peaks: Iterator[int] = iter(peaks)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return next(self.peaks)

    def allocated_bytes(self) -> int:
        return 1000


class Spy:
    """Passes everything on to a stage's model and notes the sizes that it computes."""

    def __init__(self, stage: DecoderStage) -> None:
        self._stage = stage
        self.layers_tokens: list[int] = []
        self.head_rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def layers(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        self.layers_tokens.append(len(hidden))
        return self._stage.layers(hidden, batch)

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(hidden_rows))
        return self._stage.head(hidden_rows)


def shape_of(**changes: Any) -> StageShape:
    usual: dict[str, Any] = {
        "layers": LayerRange(first=0, last=1),
        "is_first": True,
        "is_last": True,
        "dtype": torch.float32,
        "num_cohorts": 2,
        "num_slots": 4,
        "slot_tokens": 40,
        "max_step_tokens": 64,
    }
    return StageShape(**(usual | changes))


REPORTS = (16, 16, 16, 16)
"""Rows of the head for log probabilities of prompts, which are asked for of every token."""


@pytest.mark.parametrize(
    ("ends", "graphs", "step_bytes", "head_rows"),
    [
        ({}, GraphMode.OFF, 300, [4, *REPORTS]),
        ({}, GraphMode.FULL, 400, [4, *REPORTS]),
        ({"is_last": False}, GraphMode.PIECEWISE, 400, []),
        ({"is_first": False}, GraphMode.OFF, 300, [4, *REPORTS]),
        ({"is_first": False, "is_last": False}, GraphMode.OFF, 300, []),
    ],
    ids=["alone", "captured", "first", "last", "middle"],
)
def test_a_device_runs_the_largest_step_without_and_with_sampling(
    tmp_path: Path, ends: dict[str, bool], graphs: GraphMode, step_bytes: int, head_rows: list[int]
) -> None:
    model_dir = write_tiny_llama(tmp_path)
    config = read_model_config(model_dir)
    device = ScriptedMemory(100, 300)
    shape = shape_of(**ends)
    shape = shape_of(**ends, num_blocks=blocks_to_measure(shape))
    attention = PlainAttention(attention_heads(config))
    spy = Spy(build_stage_model(tmp_path, config, shape, lambda *_: None, accelerator=device, attention=attention))
    use = measure(cast(Any, spy), config, shape, graphs, device)
    assert use == MemoryUse(held_bytes=1000, step_bytes=step_bytes)
    assert (spy.layers_tokens, spy.head_rows) == ([64, 64], head_rows)
    again = measure(cast(Any, spy), config, shape, graphs, ScriptedMemory(1, 2))
    assert again.held_bytes == 1000, "the slots gave up their blocks, so that it can be run again"


@pytest.mark.parametrize(("drafts", "draws"), [(3, 4 * 4), (15, 4 * 16), (16, 4 * 16)])
def test_drafts_are_measured_where_they_are_drawn(tmp_path: Path, drafts: int, draws: int) -> None:
    """Each token of a verifying row has logits of its own."""
    config = read_model_config(write_tiny_llama(tmp_path))
    shape = shape_of()
    shape = shape_of(num_blocks=blocks_to_measure(shape))
    device = ScriptedMemory(100, 300, 500)
    attention = PlainAttention(attention_heads(config))
    spy = Spy(build_stage_model(tmp_path, config, shape, lambda *_: None, accelerator=device, attention=attention))
    use = measure(cast(Any, spy), config, shape, GraphMode.OFF, device, drafts=drafts)
    assert use == MemoryUse(held_bytes=1000, step_bytes=500)
    assert spy.head_rows == [4, *REPORTS, 4, draws]


def test_stages_that_draw_nothing_measure_no_drafts(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_llama(tmp_path))
    shape = shape_of(is_last=False)
    shape = shape_of(is_last=False, num_blocks=blocks_to_measure(shape))
    device = ScriptedMemory(100, 300)
    stage = build_stage_model(
        tmp_path, config, shape, lambda *_: None, accelerator=device, attention=PlainAttention(attention_heads(config))
    )
    assert measure(stage, config, shape, GraphMode.OFF, device, drafts=15).step_bytes == 300


@pytest.mark.parametrize(("max_step_tokens", "captured"), [(64, 64), (256, 256), (264, 256)])
def test_what_graphs_keep_is_measured_with_the_largest_step_that_is_captured(
    tmp_path: Path, max_step_tokens: int, captured: int
) -> None:
    config = read_model_config(write_tiny_llama(tmp_path))
    shape = shape_of(max_step_tokens=max_step_tokens, slot_tokens=80, is_last=False, is_first=False)
    shape = replace(shape, num_blocks=blocks_to_measure(shape))
    attention = PlainAttention(attention_heads(config))
    stage = build_stage_model(
        tmp_path, config, shape, lambda *_: None, accelerator=ImmediateAccelerator(), attention=attention
    )
    spy = Spy(stage)
    use = measure(cast(Any, spy), config, shape, GraphMode.FULL, ScriptedMemory(100, 300))
    assert (use.step_bytes, spy.layers_tokens) == (400, [captured, padded_size(max_step_tokens)])


def drafts_for_itself(model_dir: Path, config: ModelConfig, shape: StageShape, device: Accelerator) -> LoadedDraft:
    """The model, loaded as its own draft model on `device`."""
    return load_draft(
        model_dir,
        config,
        config,
        shape,
        lambda *_: None,
        max_step_tokens=64,
        accelerator=device,
        attention=PlainAttention,
    )


@pytest.mark.parametrize(("peaks", "most"), [((700, 600), 700), ((600, 700), 700), ((200, 200), 500)])
def test_a_draft_model_is_measured_where_it_drafts(tmp_path: Path, peaks: tuple[int, int], most: int) -> None:
    """First it catches up with a step's tokens, so that the last slot draws nothing; then all four slots draw."""
    config = read_model_config(write_tiny_llama(tmp_path))
    shape = shape_of()
    shape = shape_of(num_blocks=blocks_to_measure(shape))
    device = ScriptedMemory(100, 300, 500, *peaks)
    attention = PlainAttention(attention_heads(config))
    stage = build_stage_model(tmp_path, config, shape, lambda *_: None, accelerator=device, attention=attention)
    draft = drafts_for_itself(tmp_path, config, shape, device)
    spy = Spy(cast(DecoderStage, draft.stage.model))
    draft = replace(draft, stage=replace(draft.stage, model=cast(Any, spy)))
    use = measure(stage, config, shape, GraphMode.OFF, device, drafts=15, draft=draft)
    assert use == MemoryUse(held_bytes=1000, step_bytes=most)
    assert (spy.layers_tokens, spy.head_rows) == ([64, 4, 8, 4], [3, 3, 4, 4])
    again = measure(stage, config, shape, GraphMode.OFF, ScriptedMemory(1, 2, 3, 4, 5), drafts=15, draft=draft)
    assert again.step_bytes == 5, "the slots gave up their blocks, so that it can be run again"
    captured = measure(stage, config, shape, GraphMode.FULL, ScriptedMemory(10, 2, 3, 4, 5, 20), drafts=15, draft=draft)
    assert captured.step_bytes == 10 + 5 + 20, "graphs keep what the layers of both take"
    assert spy.layers_tokens[-1] == 64


def test_a_draft_models_cache_has_the_groups_blocks(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_llama(tmp_path))
    shape = shape_of(slot_tokens=400)
    draft = drafts_for_itself(tmp_path, config, shape, ImmediateAccelerator())
    assert draft.make_cache(50) == 50 * BLOCK_TOKENS * config.kv_bytes_per_token(config.num_layers, 4)


@given(
    cohorts=st.integers(1, 8),
    slots=st.integers(1, 40),
    slot_tokens=st.integers(1, 600),
    max_step_tokens=st.integers(1, 2048),
)
def test_the_largest_plan_has_all_tokens_that_the_slots_can_take(
    cohorts: int, slots: int, slot_tokens: int, max_step_tokens: int
) -> None:
    shape = shape_of(
        num_cohorts=cohorts, num_slots=cohorts * slots, slot_tokens=slot_tokens, max_step_tokens=max_step_tokens
    )
    plan = largest_plan(shape, 100, samples=True)
    num_rows = min(shape.num_slots, max_step_tokens)
    assert [row.slot for row in plan.rows] == list(range(num_rows)) == [fill.slot for fill in plan.fills]
    assert max(row.num_tokens for row in plan.rows) <= slot_tokens
    assert all(len(row.token_ids) == row.num_tokens > 0 for row in plan.rows)
    assert plan.num_tokens == min(max_step_tokens, num_rows * slot_tokens)
    assert len(plan.sampled_rows) == num_rows
    assert plan.padded_tokens >= plan.num_tokens
