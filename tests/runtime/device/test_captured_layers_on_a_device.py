"""Layers captured for a device give the eager layers' results, plan after plan, whatever the plan's size and rows.

The graphs here are noted CPU operations, replayed on the same memory as CUDA's would be; that CUDA records them too
is `make gpu-check`'s to show.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oracles.paged_store import own_blocks
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.tiny_models import write_tiny_llama, write_tiny_mistral, write_tiny_qwen3, write_tiny_qwen3_moe
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.decoder import DecoderStage, attention_heads, build_stage_model
from stageline_runtime.models.device.graphs import step_sizes
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import CaptureSizes, GraphsUnavailableError, StageShape
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, StepPlan
from stageline_runtime.plan_bus.step_plan import decode_sizes, padded_size

SLOTS, SLOT_TOKENS, MAX_TOKENS = 6, 48, 40
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": write_tiny_llama,
    "qwen3": write_tiny_qwen3,
    "mistral, window 5": lambda path: write_tiny_mistral(path, sliding_window=5),
}


def build(model_dir: Path, dtype: torch.dtype = torch.float32) -> DecoderStage:
    config = read_model_config(model_dir)
    shape = StageShape(
        layers=LayerRange(first=0, last=config.num_layers - 1),
        is_first=True,
        is_last=True,
        dtype=dtype,
        num_cohorts=1,
        num_slots=SLOTS,
        slot_tokens=SLOT_TOKENS,
        max_step_tokens=MAX_TOKENS,
    )
    attention = PlainAttention(attention_heads(config))
    stage = build_stage_model(
        model_dir, config, shape, lambda *_: None, accelerator=ImmediateAccelerator(), attention=attention
    )
    stage.change_tables(own_blocks(SLOTS, SLOT_TOKENS))
    return stage


def plans(graphs: GraphMode) -> list[StepPlan]:
    """Chunks, single tokens of every number of rows, both at once, and padding alone."""
    rows = [
        [(slot, 0, 2 + 3 * slot) for slot in range(3)],
        [(slot, 0, 4) for slot in range(3, SLOTS)],
        *([(SLOTS - 1 - index, 20 + count, 1) for index in range(count)] for count in range(1, SLOTS + 1)),
        [(0, 30, 1), (1, 20, 17), (2, 40, 1)],
        [],
        [(0, 5, 37)],
    ]
    made = []
    for seq, entries in enumerate(rows):
        single = graphs is GraphMode.FULL and all(count == 1 for _, _, count in entries)
        mode = GraphMode.FULL if single else GraphMode.PIECEWISE
        planned = tuple(PlanRow(slot, 1, at, count, (), need_sample=True) for slot, at, count in entries)
        padded = padded_size(sum(count for _, _, count in entries) or 3)
        made.append(
            StepPlan(seq, 0, (), planned, padded, -1, feedback_posted=False, dummy=not entries, graph_mode=mode)
        )
    return made


@pytest.mark.parametrize("graphs", [GraphMode.FULL, pytest.param(GraphMode.PIECEWISE, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in [*MODELS][1:])])
def test_replays_equal_eager_runs(name: str, graphs: GraphMode, tmp_path: Path) -> None:
    compare_replays(MODELS[name](tmp_path), graphs)


@pytest.mark.parametrize("graphs", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_replays_of_a_mixture_equal_eager_runs_whatever_its_tokens_pick(graphs: GraphMode, tmp_path: Path) -> None:
    """On a device that queues experts without a wait."""
    compare_replays(write_tiny_qwen3_moe(tmp_path), graphs, torch.bfloat16)


def compare_replays(model_dir: Path, graphs: GraphMode, dtype: torch.dtype = torch.float32) -> None:
    """Plans of every kind, captured and eager; fails where they differ by more than rounding."""
    eager, captured = build(model_dir, dtype), build(model_dir, dtype)
    sizes = CaptureSizes(decode=decode_sizes(SLOTS), step=(MAX_TOKENS,))
    said: list[str] = []
    report = captured.capture_graphs(graphs, sizes, said.append)
    pieces = len(step_sizes(MAX_TOKENS)) + (0 if graphs is GraphMode.FULL else len({*decode_sizes(SLOTS)}))
    num_layers = read_model_config(model_dir).num_layers
    whole = len(decode_sizes(SLOTS)) if graphs is GraphMode.FULL else 0
    assert report.graphs == whole + pieces * (num_layers + 1)
    assert len(said) == whole + pieces
    generator = torch.Generator().manual_seed(3)
    for plan in plans(graphs):
        token_ids = torch.randint(0, 64, (plan.padded_tokens,), generator=generator)
        hidden = captured.embed(token_ids)
        off = StepPlan(*[getattr(plan, field) for field in plan.__struct_fields__ if field != "graph_mode"][:8])
        expected = eager.layers(hidden, eager.step_batch(off))
        actual = captured.layers(hidden, captured.step_batch(plan))
        assert actual.shape == expected.shape
        atol, rtol = (2e-5, 1e-4) if dtype is torch.float32 else (0.05, 0.05)
        torch.testing.assert_close(actual[: plan.num_tokens], expected[: plan.num_tokens], atol=atol, rtol=rtol)


def test_a_plan_larger_than_every_graph_runs_eagerly(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path)
    eager, captured = build(model_dir), build(model_dir)
    captured.capture_graphs(GraphMode.FULL, CaptureSizes(decode=(1, 2), step=(16,)), lambda _: None)
    row = PlanRow(0, 1, 0, 30, (), need_sample=True)
    plan = StepPlan(0, 0, (), (row,), 32, -1, feedback_posted=False, dummy=False, graph_mode=GraphMode.PIECEWISE)
    hidden = captured.embed(torch.arange(32) % 50)
    expected = eager._layers(hidden, eager._table.fill(eager.step_batch(plan)))
    assert torch.equal(captured.layers(hidden, captured.step_batch(plan)), expected)


def test_a_mixture_whose_products_wait_for_the_device_is_refused(tmp_path: Path) -> None:
    stage = build(write_tiny_qwen3_moe(tmp_path), torch.float32)
    with pytest.raises(GraphsUnavailableError, match=r"mixture of experts.* torch.float32 on simulated"):
        stage.capture_graphs(GraphMode.FULL, CaptureSizes(decode=(1,), step=(8,)), lambda _: None)


def test_step_sizes_double_up_to_the_largest() -> None:
    assert step_sizes(100) == (16, 32, 64, 100)
    assert step_sizes(16) == (16,)
    assert step_sizes(8) == (8,)
