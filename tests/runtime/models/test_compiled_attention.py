"""Compiled attention does what the plain operators do: rotation, storing, attention, and for no other row."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_runtime.models.rotary import rotate
from stageline_runtime.native.attention_kernel import AttentionInputs, AttentionKernel, HeadShape
from stageline_runtime.native.build import NativeUnavailableError, find_compiler, load_library
from stageline_runtime.native.row_kernels import compile_kernels, kernels_if_possible

NUM_SLOTS, SLOT_TOKENS, KV_HEADS = 5, 90, 2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
SHAPES = [(64, 3), (128, 1), (32, 4), (80, 2)]

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path")


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[torch.dtype, int, int], AttentionKernel]:
    library = load_library()
    return {
        (dtype, head_dim, group_size): AttentionKernel(library, head_shape(dtype, head_dim, group_size))
        for dtype in TOLERANCE
        for head_dim, group_size in SHAPES
    }


def head_shape(dtype: torch.dtype, head_dim: int, group_size: int) -> HeadShape:
    return HeadShape(
        num_kv_heads=KV_HEADS, group_size=group_size, head_dim=head_dim, slot_tokens=SLOT_TOKENS, dtype=dtype
    )


def plain_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """Attention in float64 of consecutive tokens `[num_tokens, num_heads, head_dim]` from `position` on."""
    num_tokens, num_heads, head_dim = query.shape
    own = torch.arange(position, position + num_tokens)[:, None]
    context = torch.arange(keys.shape[1])[None, :]
    hidden = (context > own) | (context <= own - (window or keys.shape[1]))
    wide_keys, wide_values = (each.double().repeat_interleave(num_heads // KV_HEADS, 0) for each in (keys, values))
    scores = torch.einsum("thd,hcd->htc", query.double(), wide_keys) / math.sqrt(head_dim)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("htc,hcd->thd", weights, wide_values)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot in a step: the first one's row, and its position in the slot."""

    row: int
    slot: int
    position: int
    count: int = 1

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)

    @property
    def positions(self) -> slice:
        return slice(self.position, self.position + self.count)


def check_like_plain_code(
    run: Callable[[AttentionInputs], None],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    chunks: list[Chunk],
    num_tokens: int,
    window: int | None,
    already_rotated: bool,
    seed: int,
) -> None:
    """`run` over random inputs rotates, stores and attends the rows of `chunks`, and writes no other."""
    head_dim, group_size = sizes
    torch.manual_seed(seed)
    num_heads = KV_HEADS * group_size
    heads = torch.randn(num_tokens, num_heads + 2 * KV_HEADS, head_dim).to(dtype)
    query_key, value = heads[:, : num_heads + KV_HEADS], heads[:, num_heads + KV_HEADS :]
    angles = torch.randn(num_tokens, 1, head_dim // 2).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = torch.randn(2, NUM_SLOTS, KV_HEADS, SLOT_TOKENS, head_dim).to(dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    rotated = rotate(query_key, cosines, sines)
    for chunk in chunks:
        expected_keys[chunk.slot, :, chunk.positions] = rotated[chunk.rows, num_heads:].transpose(0, 1)
        expected_values[chunk.slot, :, chunk.positions] = value[chunk.rows].transpose(0, 1)
    output = torch.full((num_tokens, num_heads * head_dim), 7.0, dtype=dtype)

    run(
        AttentionInputs(
            query_key=rotated if already_rotated else query_key,
            value=value,
            rotary=None if already_rotated else (cosines, sines),
            cache=(keys, values),
            output=output,
            window=window,
        )
    )

    # A contracted multiply-add may differ from two roundings in float32; bfloat16 rounds each product by itself.
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=2e-6 if dtype == torch.float32 else 0)
    assert torch.equal(values, expected_values)
    attended = torch.zeros(num_tokens, dtype=torch.bool)
    for chunk in chunks:
        attended[chunk.rows] = True
        query = rotated[chunk.rows, :num_heads]
        expected = plain_rows(query, expected_keys[chunk.slot], expected_values[chunk.slot], chunk.position, window)
        found = output[chunk.rows].view(chunk.count, num_heads, head_dim).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
    assert (output[~attended] == 7.0).all(), "rows outside the chunks were written"


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    sizes=st.sampled_from(SHAPES),
    positions=st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, SLOT_TOKENS - 1), min_size=1),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 7, 64]),
    already_rotated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_are_rotated_stored_and_attended_like_plain_code(
    kernels: dict[tuple[torch.dtype, int, int], AttentionKernel],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    positions: dict[int, int],
    padding: int,
    window: int | None,
    already_rotated: bool,
    seed: int,
) -> None:
    chunks = [Chunk(row, slot, position) for row, (slot, position) in enumerate(positions.items())]
    table = torch.tensor([(chunk.row, chunk.slot, chunk.position) for chunk in chunks])
    kernel = kernels[dtype, *sizes]
    check_like_plain_code(
        lambda inputs: kernel.decode(inputs, table),
        dtype,
        sizes,
        chunks,
        len(chunks) + padding,
        window,
        already_rotated,
        seed,
    )


CHUNKS = st.lists(
    st.tuples(st.integers(0, SLOT_TOKENS - 2), st.integers(2, SLOT_TOKENS)), min_size=1, max_size=NUM_SLOTS
)
"""Position and number of tokens of a prefill chunk in each slot; what would leave the slot is cut off."""


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    sizes=st.sampled_from(SHAPES),
    spans=CHUNKS,
    gap=st.integers(0, 2),
    window=st.sampled_from([None, 1, 7, 64, 70]),
    already_rotated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunks_are_rotated_stored_and_attended_like_plain_code(
    kernels: dict[tuple[torch.dtype, int, int], AttentionKernel],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    spans: list[tuple[int, int]],
    gap: int,
    window: int | None,
    already_rotated: bool,
    seed: int,
) -> None:
    chunks: list[Chunk] = []
    num_tokens = 0
    for slot, (position, count) in enumerate(spans):
        chunks.append(Chunk(num_tokens + gap, slot, position, min(count, SLOT_TOKENS - position)))
        num_tokens = chunks[-1].rows.stop
    table = torch.tensor([(chunk.row, chunk.slot, chunk.position, chunk.count) for chunk in chunks])
    kernel = kernels[dtype, *sizes]
    check_like_plain_code(
        lambda inputs: kernel.prefill(inputs, table), dtype, sizes, chunks, num_tokens, window, already_rotated, seed
    )


def test_a_long_chunk_attends_like_its_tokens_one_by_one() -> None:
    """Several blocks of queries and of keys, the first of them partly before the chunk."""
    shape = HeadShape(num_kv_heads=2, group_size=3, head_dim=64, slot_tokens=700, dtype=torch.float32)
    kernel = compile_kernels(shape).attention
    torch.manual_seed(0)
    heads = torch.randn(500, 10, 64)
    keys, values = torch.randn(2, 1, 2, 700, 64)
    found, expected = torch.empty(500, 384), torch.empty(500, 384)
    angles = torch.randn(500, 1, 32).repeat(1, 1, 2)
    rotary = (angles.cos(), angles.sin())
    whole = AttentionInputs(heads[:, :8], heads[:, 8:], rotary, (keys.clone(), values.clone()), found, None)
    kernel.prefill(whole, torch.tensor([(0, 0, 150, 500)]))
    alone = AttentionInputs(heads[:, :8], heads[:, 8:], rotary, (keys, values), expected, None)
    for token in range(500):
        kernel.decode(alone, torch.tensor([(token, 0, 150 + token)]))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_without_a_compiler_the_plain_operators_are_chosen_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert kernels_if_possible(head_shape(torch.float32, 64, 1)) is None
    assert "no C compiler on the path" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NativeUnavailableError, match=r"false failed with status 1"):
        compile_kernels(head_shape(torch.float32, 64, 1))


def test_loading_leaves_denormal_numbers_alone() -> None:
    """Code linked for fast math would flush them to zero in the whole process."""
    program = (
        "import torch\n"
        "from stageline_runtime.native.build import load_library\n"
        "load_library()\n"
        "assert torch.tensor([1e-40]).mul(0.5).item() > 0, 'denormal numbers are flushed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
