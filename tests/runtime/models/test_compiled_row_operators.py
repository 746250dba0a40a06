"""Compiled normalisation and gate round as the plain operators do."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.models.layers.row_modules import RmsNorm
from stageline_runtime.native.build import find_compiler, load_library
from stageline_runtime.native.row_kernels import RowKernels

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative. A float32 sum in another order moves the last bit, which may move a bfloat16 to its neighbour."""


@pytest.fixture(scope="module")
def kernels() -> dict[torch.dtype, RowKernels]:
    library = load_library()
    return {dtype: RowKernels(library, dtype) for dtype in TOLERANCE}


SIZES = st.sampled_from([1, 7, 64, 576, 1536])


@given(dtype=st.sampled_from(list(TOLERANCE)), num_rows=st.integers(0, 9), size=SIZES, seed=st.integers(0, 99))
def test_normalised_rows_equal_the_plain_operators(
    kernels: dict[torch.dtype, RowKernels], dtype: torch.dtype, num_rows: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows, addend = (torch.randn(2, num_rows, size) * 3).to(dtype)
    weight = torch.randn(size).to(dtype)
    plain, compiled = RmsNorm(weight, 1e-5), RmsNorm(weight, 1e-5, kernels[dtype])
    torch.testing.assert_close(compiled(rows), plain(rows), rtol=TOLERANCE[dtype], atol=1e-6)
    expected_sum, expected = plain.after_adding(rows, addend.clone())
    found_sum, found = compiled.after_adding(rows, addend.clone())
    assert torch.equal(found_sum, expected_sum)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(dtype=st.sampled_from(list(TOLERANCE)), num_rows=st.integers(0, 9), size=SIZES, seed=st.integers(0, 99))
def test_the_gate_equals_the_plain_operators_for_small_and_huge_values(
    kernels: dict[torch.dtype, RowKernels], dtype: torch.dtype, num_rows: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    gate_up = torch.randn(num_rows, 2 * size).to(dtype) * torch.tensor([1.0, 30.0, 200.0])[seed % 3].to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(kernels[dtype].gate(gate_up), F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=1e-6)
