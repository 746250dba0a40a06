"""The kernels on rows give what plain torch gives, in Triton's interpreter; and they compile for the GPUs we mean.

Neither shows that they run on a GPU: `make gpu-check` does, where there is one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, cast

import pytest
import torch

from stageline_bench.gpu_check.row_cases import EPS, NORMS, SMALL_MAGNITUDE, TOLERANCE, cases, run
from stageline_runtime.models.device.row_operators import TritonRows
from stageline_runtime.models.layers.row_modules import RmsNorm
from stageline_runtime.models.rotary import rotate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: it comes with torch's CUDA build only"
)
Constants = dict[str, int | bool]
NORM: Constants = {"SIZE": 5120, "BLOCK": 8192}
ROTATION: Constants = {"NUM_HEADS": 40, "HALF": 64, "BLOCK_HEADS": 16, "BLOCK_HALF": 64}
KERNELS: dict[str, tuple[str, Constants]] = {
    "norm": ("normalise_rows", NORM | {"HAS_ADDEND": False}),
    "norm of a sum": ("normalise_rows", NORM | {"HAS_ADDEND": True}),
    "rotation": ("rotate_heads", ROTATION | {"HAS_NORM": False}),
    "rotation behind a norm": ("rotate_heads", ROTATION | {"HAS_NORM": True}),
    "gate": ("gate_rows", {"SIZE": 5632, "BLOCK": 1024}),
}


def test_every_shape_is_as_plain_torch_has_it() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "stageline_bench.gpu_check.row_cases"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert {result["operator"] for result in results} == KERNELS.keys()
    wrong = [result for result in results if not result["error"] <= TOLERANCE[result["dtype"]]]
    assert not wrong, wrong


class RowsWith:
    """Plain torch in the kernels' place, with an `eps` of its own in every norm."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, _eps: float) -> torch.Tensor:
        return RmsNorm(weight, self._eps)(rows)

    def add_rms_norm(self, rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, _eps: float) -> torch.Tensor:
        return RmsNorm(weight, self._eps)(addend.add_(rows))

    def rotate(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        assert norm is not None, "asked of norms alone"
        return rotate(RmsNorm(norm.weight, self._eps)(heads), cosines, sines)


@pytest.mark.parametrize("operator", NORMS)
def test_a_norm_that_ignores_eps_is_found_in_every_dtype(operator: str) -> None:
    small = [case for case in cases() if case.operator == operator and case.magnitude == SMALL_MAGNITUDE]
    assert {case.dtype for case in small} == TOLERANCE.keys(), small
    errors = {
        case.dtype: [run(case, cast(TritonRows, RowsWith(eps))) for eps in (EPS, 2 * EPS, EPS / 2, 0.0)]
        for case in small
    }
    assert all(right == 0.0 for right, *_ in errors.values()), errors
    assert all(min(others) > TOLERANCE[dtype] for dtype, (_, *others) in errors.items()), errors


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "architecture"), [("bf16", 80), ("bf16", 90), ("fp32", 90), ("bf16", 100)], ids=str)
def test_kernels_compile_for_a_gpu(kernel: str, dtype: str, architecture: int) -> None:
    """Through ptxas to code for the GPU, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stageline_runtime.models.device import row_kernels

    name, constants = KERNELS[kernel]
    function = getattr(row_kernels, name)
    if type(function).__name__ == "InterpretedFunction":
        pytest.skip("this process interprets Triton")
    types = {"eps": "fp32", "heads_stride": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}") for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert len(compiled.asm["cubin"]) > 0
