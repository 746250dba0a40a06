"""The kernels that draw tokens draw the CPU's, in Triton's interpreter; and they compile for the GPUs we mean.

Neither shows that they run on a GPU: `make gpu-check` does, where there is one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stageline_bench.gpu_check.sampling_cases import TOP_KS, TOP_PS, combinations, wrong_rows
from stageline_runtime.sampling.device_sampler import MOST_SPLITS, TILE_BLOCKS, settling_constants, splits_of

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: it comes with torch's CUDA build only"
)
POINTERS = {
    "logits": "*fp32",
    "rows": "*i64",
    "scratch": "*i64",
    "drawn": "*i64",
}
QWEN_BLOCKS = 4_748
"""Of 151,936 tokens."""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "stageline_bench.gpu_check.sampling_cases"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


@needs_triton
@pytest.mark.thorough
def test_every_token_is_the_cpus(results: list[dict[str, Any]]) -> None:
    wrong = [row for result in results for row in wrong_rows(result)]
    assert not wrong, wrong


@needs_triton
@pytest.mark.thorough
def test_the_cases_cover_what_could_differ(results: list[dict[str, Any]]) -> None:
    assert {result["vocab_size"] for result in results} >= {1_000, 49_152, 151_936}
    assert {result["kind"] for result in results} == {"ties", "zeros", "flat", "peaked", "alone", "pair", "normal"}
    rows = [row for result in results for row in result["rows"]]
    assert {row["top_p"] for row in rows} >= {*TOP_PS}
    assert {row["top_k"] for row in rows} >= {*TOP_KS}
    mixed = [result for result in results if {row["temperature"] > 0.0 for row in result["rows"]} == {True, False}]
    assert mixed, "greedy rows beside others"
    assert len({token for result in results for token in result["drawn"]}) > 40


def test_a_wrong_token_is_told_with_its_row() -> None:
    row = {"temperature": 1.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0}
    result = {"kind": "flat", "vocab_size": 9, "rows": [row, row], "drawn": [3, 4], "expected": [3, 5]}
    assert wrong_rows(result) == [{"kind": "flat", "vocab_size": 9, **row, "drawn": 4, "expected": 5}]
    assert len(combinations()) == 3 * 4 * 5 * 2


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256, 5_000])
@pytest.mark.parametrize("num_tiles", [1, 16, 75])
def test_a_row_is_divided_among_no_more_programs_than_it_has_tiles(num_rows: int, num_tiles: int) -> None:
    splits = splits_of(num_rows, num_tiles, processors=132)
    assert 1 <= splits <= min(num_tiles, MOST_SPLITS)
    assert num_rows > 1 or splits == min(num_tiles, MOST_SPLITS)


@needs_triton
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [("scan_rows", {"TILE_BLOCKS": TILE_BLOCKS}, 4), ("settle_rows", settling_constants(QWEN_BLOCKS), 8)],
    ids=["scan", "settle"],
)
def test_kernels_compile_for_a_gpu(kernel: str, constants: dict[str, int], warps: int, architecture: int) -> None:
    """Through ptxas to code for the GPU, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stageline_runtime.sampling import device_kernels

    function = getattr(device_kernels, kernel)
    if type(function).__name__ == "InterpretedFunction":
        pytest.skip("this process interprets Triton")
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 0
