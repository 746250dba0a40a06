"""After the warm-up no plan compiles anything, and compiled layers compute what plain ones do, into the same cache."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from oracles.tiny_models import (
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_qwen2,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.cpu.decoder import DecoderStage, build_stage_model
from stageline_runtime.models.protocol import CaptureSizes, GraphsUnavailableError, StageShape
from stageline_runtime.native.build import find_compiler
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, StepPlan
from stageline_runtime.plan_bus.step_plan import decode_sizes, padded_size, plan_graph_mode

SLOTS = 12
SLOT_TOKENS = 64
SIZES = CaptureSizes(decode=decode_sizes(SLOTS), step=(32,))
MODES = (GraphMode.PIECEWISE, GraphMode.FULL)

needs_compilers = pytest.mark.skipif(
    find_compiler() is None or shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="compiling layers needs a C and a C++ compiler",
)


def write_tiny_windowed(directory: Path) -> Path:
    return write_tiny_mistral(directory, sliding_window=5, num_layers=2)


def build(model_dir: Path, dtype: torch.dtype) -> DecoderStage:
    config = read_model_config(model_dir)
    return build_stage_model(
        model_dir,
        config,
        StageShape(
            layers=LayerRange(first=0, last=config.num_layers - 1),
            is_first=True,
            is_last=True,
            dtype=dtype,
            num_cohorts=1,
            slots_per_cohort=SLOTS,
            slot_tokens=SLOT_TOKENS,
        ),
        lambda _loaded, _total: None,
    )


def rows_of_steps() -> Iterator[list[tuple[int, int, int]]]:
    """(slot, position, tokens) of each row: chunks, then decodes of every number of rows, then both at once.

    At last rows that verify drafts: alone, of every size that is padded to, and beside decodes.
    """
    yield [(slot, 0, 2 + slot) for slot in range(4)]
    yield [(slot, 0, 3) for slot in range(4, SLOTS)]
    for num_rows in range(1, SLOTS + 1):
        yield [(SLOTS - num_rows + index, 14 + num_rows, 1) for index in range(num_rows)]
    yield [(0, 20, 1), (2, 20, 9), (5, 30, 1), (7, 20, 20)]
    for num_tokens in (2, 3, 4, 8, 16, 17):
        yield [(0, 21, num_tokens)]
    yield [(1, 27, 1), (2, 29, 4), (3, 27, 1)]


@torch.inference_mode()
def run_all(model: DecoderStage, graphs: GraphMode) -> list[torch.Tensor]:
    """Logits of every real token of every step."""
    results = []
    for seq, sizes in enumerate(rows_of_steps()):
        rows = tuple(PlanRow(slot, 1, position, tokens, (), need_sample=True) for slot, position, tokens in sizes)
        num_tokens = sum(row.num_tokens for row in rows)
        mode = plan_graph_mode(graphs, rows, dummy=False)
        plan = StepPlan(seq, 0, (), rows, padded_size(num_tokens), -1, False, False, mode)
        # Past the padding token, whose embedding is zero in some families.
        token_ids = (torch.arange(plan.padded_tokens) * 7 + seq) % 200 + 20
        hidden = model.layers(model.embed(token_ids), model.attention_batch(plan))
        results.append(model.head(hidden[:num_tokens]))
    return results


@pytest.fixture
def default_stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.thorough
@needs_compilers
@pytest.mark.usefixtures("default_stance")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's own imports
@pytest.mark.parametrize(
    "graphs", [mode if mode is GraphMode.FULL else pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES]
)
@pytest.mark.parametrize(
    ("write_model", "dtype"),
    [
        (write_tiny_llama, torch.float32),
        pytest.param(write_tiny_qwen3, torch.float32, marks=pytest.mark.soak),
        pytest.param(write_tiny_qwen2, torch.float32, marks=pytest.mark.soak),
        pytest.param(write_tiny_windowed, torch.float32, marks=pytest.mark.soak),
        pytest.param(write_tiny_llama, torch.bfloat16, marks=pytest.mark.soak),
    ],
)
def test_compiled_and_plain_layers_agree_and_nothing_compiles_later(
    write_model: Callable[[Path], Path],
    dtype: torch.dtype,
    graphs: GraphMode,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model_dir = write_model(tmp_path / "model")
    plain, captured = build(model_dir, dtype), build(model_dir, dtype)
    said: list[str] = []
    report = captured.capture_graphs(graphs, SIZES, tmp_path_factory.getbasetemp(), said.append)
    assert report.graphs > 0, said
    assert report.seconds > 0
    torch.compiler.set_stance("fail_on_recompile")
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    steps = zip(run_all(captured, graphs), run_all(plain, GraphMode.OFF), strict=True)
    for step, (actual, expected) in enumerate(steps):
        error = ((actual - expected).abs().mean() / expected.abs().mean()).item()
        assert error < tolerance, f"step {step}: {error}"


@pytest.mark.parametrize(
    "graphs", [mode if mode is GraphMode.FULL else pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES]
)
def test_a_mixture_of_experts_is_refused(graphs: GraphMode, tmp_path: Path) -> None:
    model = build(write_tiny_qwen3_moe(tmp_path / "model"), torch.float32)
    with pytest.raises(GraphsUnavailableError, match="mixture of experts"):
        model.capture_graphs(graphs, SIZES, tmp_path, lambda _message: None)
