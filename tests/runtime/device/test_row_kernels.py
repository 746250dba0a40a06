"""The kernels on rows give what plain torch gives, in Triton's interpreter; and they compile for the GPUs we mean.

Neither shows that they run on a GPU: `make gpu-check` does, where there is one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stageline_bench.gpu_check.row_cases import TOLERANCE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: it comes with torch's CUDA build only"
)
CONSTANTS: dict[str, dict[str, int | bool]] = {
    "normalise_rows": {"SIZE": 5120, "BLOCK": 8192, "HAS_ADDEND": True},
    "rotate_heads": {"NUM_HEADS": 40, "HALF": 64, "BLOCK_HEADS": 16, "BLOCK_HALF": 64, "HAS_NORM": True},
    "gate_rows": {"SIZE": 5632, "BLOCK": 1024},
}


@pytest.mark.thorough
def test_every_shape_is_as_plain_torch_has_it() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "stageline_bench.gpu_check.row_cases"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert {result["operator"] for result in results} == {
        "norm",
        "norm of a sum",
        "gate",
        "rotation",
        "rotation behind a norm",
    }
    wrong = [result for result in results if not result["error"] <= TOLERANCE[result["dtype"]]]
    assert not wrong, wrong


@pytest.mark.parametrize("kernel", CONSTANTS)
@pytest.mark.parametrize(("dtype", "architecture"), [("bf16", 80), ("bf16", 90), ("fp32", 90), ("bf16", 100)], ids=str)
def test_kernels_compile_for_a_gpu(kernel: str, dtype: str, architecture: int) -> None:
    """Through ptxas to code for the GPU, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stageline_runtime.models.device import row_kernels

    function, constants = getattr(row_kernels, kernel), CONSTANTS[kernel]
    if type(function).__name__ == "InterpretedFunction":
        pytest.skip("this process interprets Triton")
    types = {"eps": "fp32", "heads_stride": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}") for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert len(compiled.asm["cubin"]) > 0
