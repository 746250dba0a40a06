"""The compiled decode kernel does what the plain operators do: rotation, storing, attention, and for no other row."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_runtime.models.native.build import NativeUnavailableError, find_compiler
from stageline_runtime.models.native.decode_kernel import DecodeKernel, HeadShape, build_decode_kernel
from stageline_runtime.models.rotary import rotate

NUM_SLOTS, SLOT_TOKENS, KV_HEADS = 5, 90, 2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
SHAPES = [(64, 3), (128, 1), (32, 4), (80, 2)]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[torch.dtype, int, int], DecodeKernel]:
    return {
        (dtype, head_dim, group_size): DecodeKernel(head_shape(dtype, head_dim, group_size))
        for dtype in TOLERANCE
        for head_dim, group_size in SHAPES
    }


def head_shape(dtype: torch.dtype, head_dim: int, group_size: int) -> HeadShape:
    return HeadShape(
        num_kv_heads=KV_HEADS, group_size=group_size, head_dim=head_dim, slot_tokens=SLOT_TOKENS, dtype=dtype
    )


def plain_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """One token's heads `[num_heads, head_dim]`, in float64."""
    first = 0 if window is None else max(0, position + 1 - window)
    group_size = query.shape[0] // KV_HEADS
    outputs = []
    for head, vector in enumerate(query.double()):
        seen = keys[head // group_size, first : position + 1].double()
        weights = (seen @ vector / math.sqrt(vector.shape[0])).softmax(dim=0)
        outputs.append(weights @ values[head // group_size, first : position + 1].double())
    return torch.stack(outputs)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    sizes=st.sampled_from(SHAPES),
    positions=st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, SLOT_TOKENS - 1), min_size=1),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 7, 64]),
    stored=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_are_rotated_stored_and_attended_like_plain_code(
    kernels: dict[tuple[torch.dtype, int, int], DecodeKernel],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    positions: dict[int, int],
    padding: int,
    window: int | None,
    stored: bool,
    seed: int,
) -> None:
    head_dim, group_size = sizes
    torch.manual_seed(seed)
    num_heads, num_tokens = KV_HEADS * group_size, len(positions) + padding
    heads = torch.randn(num_tokens, num_heads + 2 * KV_HEADS, head_dim).to(dtype)
    query_key, value = heads[:, : num_heads + KV_HEADS], heads[:, num_heads + KV_HEADS :]
    angles = torch.randn(num_tokens, 1, head_dim // 2).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = torch.randn(2, NUM_SLOTS, KV_HEADS, SLOT_TOKENS, head_dim).to(dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    rotated = rotate(query_key, cosines, sines)
    rows = [(token, slot, position) for token, (slot, position) in enumerate(positions.items())]
    for token, slot, position in rows:
        expected_keys[slot, :, position] = rotated[token, num_heads:]
        expected_values[slot, :, position] = value[token]
    if stored:
        keys, values = expected_keys.clone(), expected_values.clone()
    output = torch.full((num_tokens, num_heads * head_dim), 7.0, dtype=dtype)

    kernels[dtype, head_dim, group_size](
        rotated if stored else query_key,
        value,
        None if stored else (cosines, sines),
        (keys, values),
        torch.tensor(rows),
        output,
        window,
    )

    # A contracted multiply-add may differ from two roundings in float32; bfloat16 rounds each product by itself.
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=2e-6 if dtype == torch.float32 else 0)
    assert torch.equal(values, expected_values)
    for token, slot, position in rows:
        expected = plain_row(rotated[token, :num_heads], expected_keys[slot], expected_values[slot], position, window)
        torch.testing.assert_close(
            output[token].view(num_heads, head_dim).double(), expected, rtol=0, atol=TOLERANCE[dtype]
        )
    assert (output[len(rows) :] == 7.0).all(), "padding was written"


def test_without_a_compiler_the_plain_operators_are_chosen_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert build_decode_kernel(head_shape(torch.float32, 64, 1)) is None
    assert "no C compiler on the path" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NativeUnavailableError, match=r"false failed with status 1"):
        DecodeKernel(head_shape(torch.float32, 64, 1))


def test_loading_leaves_denormal_numbers_alone() -> None:
    """Code linked for fast math would flush them to zero in the whole process."""
    program = (
        "import torch\n"
        "from stageline_runtime.models.native.build import load_library\n"
        "load_library()\n"
        "assert torch.tensor([1e-40]).mul(0.5).item() > 0, 'denormal numbers are flushed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
