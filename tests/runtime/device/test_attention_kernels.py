"""The attention kernels give what plain torch gives, in Triton's interpreter; and they compile for the GPUs we mean.

Neither shows that they run on a GPU: `make gpu-check` does, where there is one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stageline_bench.gpu_check.attention_cases import TOLERANCE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: it comes with torch's CUDA build only"
)
INT, FLOAT = "i32", "fp32"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "stageline_bench.gpu_check.attention_cases"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def test_every_shape_is_as_plain_torch_has_it(results: list[dict[str, Any]]) -> None:
    wrong = [result for result in results if not result["error"] <= TOLERANCE[result["case"]["dtype"]]]
    assert not wrong, wrong


def test_keys_and_values_are_stored_alike(results: list[dict[str, Any]]) -> None:
    assert [result for result in results if not result["same_cache"]] == []


def test_the_cases_cover_what_could_differ(results: list[dict[str, Any]]) -> None:
    splits = {result["splits"] for result in results}
    assert splits >= {1, 3}
    assert max(splits) > 32, "more parts than are added up together"
    assert all(result["size"] > 0.1 for result in results if result["case"]["rows"])
    groups = {heads // kv_heads for heads, kv_heads, _ in (result["case"]["heads"] for result in results)}
    assert groups == {1, 2, 3, 6, 7, 16}


@pytest.mark.parametrize("in_parts", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize(("dtype", "architecture"), [("bf16", 80), ("bf16", 90), ("fp32", 90), ("bf16", 100)], ids=str)
def test_kernels_compile_for_a_gpu(dtype: str, architecture: int, in_parts: bool) -> None:
    """Through ptxas to code for the GPU, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stageline_runtime.models.device import kernels

    if type(kernels.attend_tiles).__name__ == "InterpretedFunction":
        pytest.skip("this process interprets Triton")
    constants = {"GROUP": 4, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 16 if in_parts else 64}
    constants |= {
        "BLOCK_N": 64 if dtype == "bf16" else 32,
        "IN_PARTS": in_parts,
        "BLOCK_TOKENS": 16,
        "WIDE_PRODUCTS": False,
    }
    pointers = dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}")
    types = pointers | {
        "tiles": f"*{INT}",
        "parts": f"*{INT}",
        "block_table": f"*{INT}",
        "partial_sums": f"*{FLOAT}",
        "partial_scales": f"*{FLOAT}",
        "scale": FLOAT,
    }
    names = kernels.attend_tiles.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, INT) for name in names}
    source = ASTSource(fn=kernels.attend_tiles, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    shared_memory_of_a_block = 163 << 10  # of the smallest meant, an A100
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= shared_memory_of_a_block
