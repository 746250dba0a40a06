"""The row kernels compared with plain torch's operators, over many shapes: on a GPU, or in Triton's interpreter.

`TRITON_INTERPRET=1 python -m stageline_bench.gpu_check.row_cases` prints each case's error as JSON. It is a separate
program, because Triton chooses the interpreter when it is imported.
"""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stageline_runtime.models.device.row_operators import TritonRows
from stageline_runtime.models.layers.row_modules import RmsNorm
from stageline_runtime.models.protocol import CPU
from stageline_runtime.models.rotary import rotate

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 6e-2}
"""For results of size 1, scaled up for larger ones: a few roundings, which depend on a sum's order or an exponential's
last bit. Triton's interpreter truncates bfloat16 instead of rounding.
"""
EPS = 1e-5
SMALL_MAGNITUDE = 1e-3
"""Its square is a tenth of `EPS`, so a norm without `EPS` is three times too large."""
NORMS = ("norm", "norm of a sum", "rotation behind a norm")
SIZES = (48, 576, 2048, 5120)
HEADS = ((3, 16), (12, 64), (40, 128), (17, 80))
"""Number of query and key heads together, and their size."""


@dataclass(frozen=True)
class Case:
    """One operator on rows of one size."""

    operator: str
    dtype: str
    num_rows: int
    size: tuple[int, ...]
    magnitude: float = 1.0
    """Approximate size of the normalised values."""


def cases() -> list[Case]:
    """Every operator in every dtype on one row, on seven and on 300; norms also of rows so small that `EPS`
    dominates.
    """
    sizes: dict[str, list[tuple[int, ...]]] = {
        name: [(size,) for size in SIZES] for name in ("norm", "norm of a sum", "gate")
    }
    sizes |= {name: [*HEADS] for name in ("rotation", "rotation behind a norm")}
    usual = [
        Case(operator, dtype, num_rows, size)
        for operator, dtype, num_rows in itertools.product(sizes, TOLERANCE, (1, 7, 300))
        for size in sizes[operator]
        if num_rows < 300 or size in ((576,), (12, 64))
    ]
    return usual + [
        Case(operator, dtype, 7, sizes[operator][1], SMALL_MAGNITUDE)
        for operator, dtype in itertools.product(NORMS, TOLERANCE)
    ]


def run(case: Case, rows: TritonRows, device: torch.device = CPU) -> float:
    """The error compared with plain operators on the same device."""
    drawn = torch.Generator().manual_seed(case.num_rows + sum(case.size))
    dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(dtype).to(device)

    pairs = _OPERATORS[case.operator](case, rows, draw)
    return max(_error(plain.float(), fused.float()) for plain, fused in pairs)


def _error(plain: torch.Tensor, fused: torch.Tensor) -> float:
    """The largest difference, relative for values above 1; infinite if one is not a number."""
    shares = (plain - fused).abs() / plain.abs().clamp(min=1.0)
    return float(shares.nan_to_num(nan=float("inf")).max())


Draw = Callable[..., torch.Tensor]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _norm(case: Case, rows: TritonRows, draw: Draw) -> Pairs:
    given, weight = draw(case.num_rows, *case.size) * case.magnitude, draw(*case.size)
    return [(RmsNorm(weight, EPS)(given), RmsNorm(weight, EPS, rows)(given))]


def _norm_of_a_sum(case: Case, rows: TritonRows, draw: Draw) -> Pairs:
    given, addend = (draw(case.num_rows, *case.size) * case.magnitude for _ in range(2))
    weight = draw(*case.size)
    plain = RmsNorm(weight, EPS).after_adding(given, addend.clone())
    return list(zip(plain, RmsNorm(weight, EPS, rows).after_adding(given, addend), strict=True))


def _gate(case: Case, rows: TritonRows, draw: Draw) -> Pairs:
    gate_up = draw(case.num_rows, 2 * case.size[0])
    gate, up = gate_up.chunk(2, dim=-1)
    return [(F.silu(gate) * up, rows.gate(gate_up))]


def _rotation(case: Case, rows: TritonRows, draw: Draw) -> Pairs:
    return _rotated(case, rows, draw, None)


def _rotation_behind_a_norm(case: Case, rows: TritonRows, draw: Draw) -> Pairs:
    return _rotated(case, rows, draw, RmsNorm(draw(*case.size), EPS))


def _rotated(case: Case, rows: TritonRows, draw: Draw, norm: RmsNorm | None) -> Pairs:
    """Heads in a layer's layout: the first part of rows that end with value heads."""
    num_heads, head_dim = case.size
    heads = (draw(case.num_rows, num_heads + 2, head_dim) * case.magnitude)[:, :num_heads]
    angles = draw(case.num_rows, 1, head_dim).float()
    cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    plain = rotate(heads if norm is None else norm(heads), cosines, sines)
    return [(plain, rows.rotate(heads, cosines, sines, norm))]


_OPERATORS: dict[str, Callable[[Case, TritonRows, Draw], Pairs]] = {
    "norm": _norm,
    "norm of a sum": _norm_of_a_sum,
    "gate": _gate,
    "rotation": _rotation,
    "rotation behind a norm": _rotation_behind_a_norm,
}


def results(device: torch.device = CPU) -> list[dict[str, Any]]:
    """Each case with its error."""
    rows = TritonRows()
    return [{**vars(case), "error": run(case, rows, device)} for case in cases()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(results(), sys.stdout)
