"""Attention over any blocks equals a plain softmax of each request; nothing but the step's own places is written."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.layers.attention import (
    Attention,
    AttentionHeads,
    NativeAttention,
    PlainAttention,
    RowAttention,
)
from stageline_runtime.models.layers.kv_cache import LayerCache, make_cache
from stageline_runtime.models.layers.step_batch import BatchBounds, BlockTable, StepTable, Tiling, build_step_batch
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.models.rotary import rotate
from stageline_runtime.native.attention_kernel import AttentionKernel, HeadShape
from stageline_runtime.native.build import NativeUnavailableError, find_compiler, load_library
from stageline_runtime.native.row_kernels import compile_kernels, kernels_if_possible
from stageline_runtime.plan_bus.messages import BusProtocolError, PlanRow, SlotBlocks
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of

NUM_SLOTS, SLOT_TOKENS, KV_HEADS = 5, 150, 2
NUM_BLOCKS = NUM_SLOTS * blocks_of(SLOT_TOKENS)
BOUNDS = BatchBounds(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
SHAPES = [(64, 3), (128, 1), (32, 4), (80, 2)]
KINDS = ["compiled", "rows", "plain"]


def head_shape(dtype: torch.dtype, head_dim: int, group_size: int) -> HeadShape:
    return HeadShape(
        num_kv_heads=KV_HEADS, group_size=group_size, head_dim=head_dim, slot_tokens=SLOT_TOKENS, dtype=dtype
    )


def plan_row(slot: int, position: int, num_tokens: int) -> PlanRow:
    return PlanRow(slot=slot, generation=1, position=position, num_tokens=num_tokens, token_ids=(), need_sample=False)


def attention_of(kind: str, dtype: torch.dtype, head_dim: int, group_size: int) -> Attention:
    heads = AttentionHeads(num_heads=KV_HEADS * group_size, num_kv_heads=KV_HEADS, head_dim=head_dim)
    if kind == "compiled":
        if find_compiler() is None:
            pytest.skip("no C compiler on the path: install gcc")
        return NativeAttention(AttentionKernel(load_library(), head_shape(dtype, head_dim, group_size)), heads)
    return RowAttention(heads) if kind == "rows" else PlainAttention(heads)


def cache_of(dtype: torch.dtype, head_dim: int, seed: int) -> LayerCache:
    """With something in every place, as others leave it; among it what no row may read."""
    config: ModelConfig = _HeadsAlone(KV_HEADS, head_dim)  # type: ignore[assignment]
    shape = StageShape(
        layers=LayerRange(first=0, last=0),
        is_first=False,
        is_last=False,
        dtype=dtype,
        num_cohorts=1,
        num_slots=NUM_SLOTS,
        slot_tokens=SLOT_TOKENS,
    )
    ((keys, values),) = make_cache(config, shape, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(seed)
    for part in (keys, values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return keys, values


@dataclass(frozen=True)
class _HeadsAlone:
    num_kv_heads: int
    head_dim: int


def drawn_tables(seed: int) -> tuple[list[SlotBlocks], torch.Tensor]:
    """Blocks of all slots in a drawn order, some of them neighbours; as changes and as `[num_slots, width]`."""
    random, order = Random(seed), list(range(NUM_BLOCKS))
    for _ in range(random.choice((0, 3, 100))):
        cut = random.randrange(NUM_BLOCKS)
        order = order[cut:] + order[:cut][::-1] if random.random() < 0.3 else order[cut:] + order[:cut]
    width = blocks_of(SLOT_TOKENS)
    rows = [order[slot * width : (slot + 1) * width] for slot in range(NUM_SLOTS)]
    return [SlotBlocks(slot, 0, tuple(row), are_new=True) for slot, row in enumerate(rows)], torch.tensor(rows)


def content(part: torch.Tensor, table: torch.Tensor, slot: int, end: int) -> torch.Tensor:
    """What lies at a slot's positions up to `end`: `[num_kv_heads, end, head_dim]`."""
    return part[table[slot]].transpose(0, 1).flatten(1, 2)[:, :end]


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


@st.composite
def plans(draw: st.DrawFn) -> list[PlanRow]:
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS, unique=True))
    rows = []
    for slot in slots:
        num_tokens = draw(st.sampled_from([1, 1, 1, 2, 5, 65, 130]))
        rows.append(plan_row(slot, draw(st.integers(0, SLOT_TOKENS - num_tokens)), num_tokens))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    sizes=st.sampled_from(SHAPES),
    rows=plans(),
    padding=st.integers(1, 4),
    window=st.sampled_from([None, 1, 7, 64, 70]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_rows_attends_and_writes_like_plain_code(
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    rows: list[PlanRow],
    padding: int,
    window: int | None,
    seed: int,
) -> None:
    head_dim, group_size = sizes
    attention, num_heads = attention_of(kind, dtype, head_dim, group_size), KV_HEADS * group_size
    num_tokens = sum(row.num_tokens for row in rows) + padding
    changes, table = drawn_tables(seed)
    blocks = BlockTable(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, num_blocks=NUM_BLOCKS)
    blocks.change(changes)
    step = StepTable(1024, blocks).fill(build_step_batch(rows, num_tokens, BOUNDS))
    torch.manual_seed(seed)
    heads = torch.randn(num_tokens, num_heads + 2 * KV_HEADS, head_dim).to(dtype)
    query_key, value = heads[:, : num_heads + KV_HEADS], heads[:, num_heads + KV_HEADS :]
    angles = torch.randn(num_tokens, 1, head_dim // 2).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    rotated = rotate(query_key, *rotary)
    cache = cache_of(dtype, head_dim, seed)
    expected_keys, expected_values = cache[0].clone(), cache[1].clone()

    output = attention(query_key if attention.rotates else rotated, value, rotary, cache, step, window)

    first = 0
    for row in rows:
        tokens, end = slice(first, first + row.num_tokens), row.position + row.num_tokens
        positions = torch.arange(row.position, end)
        places = table[row.slot][positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        expected_keys[places[0], :, places[1]] = rotated[tokens, num_heads:]
        expected_values[places[0], :, places[1]] = value[tokens]
        held = [content(part, table, row.slot, end) for part in (expected_keys, expected_values)]
        expected = plain_rows(rotated[tokens, :num_heads], held[0], held[1], row.position, window)
        found = output[tokens].view(row.num_tokens, num_heads, head_dim).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
        first += row.num_tokens
    assert not output[first:].any(), "padding has no output"
    # A contracted multiply-add may differ from two roundings in float32; bfloat16 rounds each product by itself.
    # What padding writes goes to the block that is no slot's, the last.
    tolerance = 2e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(cache[0][:-1], expected_keys[:-1], rtol=0, atol=tolerance)
    assert torch.equal(cache[1][:-1], expected_values[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_earlier_holder_left_behind_is_never_read(kind: str) -> None:
    """Not even as something that counts nothing: zero times NaN is NaN."""
    attention = attention_of(kind, torch.float32, 64, 1)
    cache = cache_of(torch.float32, 64, 0)
    for part in cache:
        part.fill_(float("nan"))
    blocks = BlockTable(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, num_blocks=NUM_BLOCKS)
    blocks.change(drawn_tables(1)[0])
    step = StepTable(64, blocks).fill(build_step_batch([plan_row(0, 0, 1), plan_row(1, 0, 20)], 24, BOUNDS))
    rotary = torch.ones(24, 1, 64), torch.zeros(24, 1, 64)
    output = attention(torch.ones(24, 4, 64), torch.ones(24, 2, 64), rotary, cache, step, None)
    torch.testing.assert_close(output, torch.cat((torch.ones(21, 128), torch.zeros(3, 128))))


def test_a_long_chunk_attends_like_its_tokens_one_by_one() -> None:
    """Several blocks of queries and of keys, the first of them partly before the chunk."""
    kernel = compile_kernels(head_shape(torch.float32, 64, 3)).attention if find_compiler() else None
    if kernel is None:
        pytest.skip("no C compiler on the path: install gcc")
    heads = AttentionHeads(num_heads=6, num_kv_heads=2, head_dim=64)
    attention = NativeAttention(kernel, heads)
    blocks = BlockTable(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, num_blocks=NUM_BLOCKS)
    blocks.change(drawn_tables(5)[0])
    table = StepTable(128, blocks)
    torch.manual_seed(0)
    query_key, value = torch.randn(110, 8, 64), torch.randn(110, 2, 64)
    angles = torch.randn(110, 1, 32).repeat(1, 1, 2)
    rotary = (angles.cos(), angles.sin())
    whole, alone = cache_of(torch.float32, 64, 2), cache_of(torch.float32, 64, 2)
    found = attention(
        query_key, value, rotary, whole, table.fill(build_step_batch([plan_row(0, 37, 110)], 110, BOUNDS)), None
    )
    for token in range(110):
        step = table.fill(build_step_batch([plan_row(0, 37 + token, 1)], 1, BOUNDS))
        own = slice(token, token + 1)
        one = attention(query_key[own], value[own], (rotary[0][own], rotary[1][own]), alone, step, None)
        torch.testing.assert_close(found[own], one, rtol=0, atol=2e-6)


def test_an_unused_cache_occupies_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config: ModelConfig = _HeadsAlone(4, 64)  # type: ignore[assignment]
    shape = StageShape(
        layers=LayerRange(first=0, last=1),
        is_first=False,
        is_last=False,
        dtype=torch.bfloat16,
        num_cohorts=1,
        num_slots=64,
        slot_tokens=4096,
    )
    before = resident_bytes()
    caches = make_cache(config, shape, 64 * blocks_of(4096))
    assert sum(part.nbytes for cache in caches for part in cache) > 512 << 20
    assert not caches[1][0][77, 2].any()
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize(
    "row",
    [plan_row(NUM_SLOTS, 0, 1), plan_row(-1, 0, 1), plan_row(0, SLOT_TOKENS, 1), plan_row(0, SLOT_TOKENS - 1, 2)],
)
def test_a_row_outside_its_slot_is_refused(row: PlanRow) -> None:
    with pytest.raises(BusProtocolError, match="slot"):
        build_step_batch([row], 4, BOUNDS)


def test_rows_that_outgrow_the_padding_are_refused() -> None:
    with pytest.raises(BusProtocolError, match="padded_tokens is 2"):
        build_step_batch([plan_row(0, 0, 3)], 2, BOUNDS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (SlotBlocks(NUM_SLOTS, 0, (1,)), "slot 5, parts 0 to 1, of 5 slots"),
        (SlotBlocks(0, 9, (1, 2)), "parts 9 to 11"),
        (SlotBlocks(0, 0, (1, NUM_BLOCKS)), r"\(1, 50\): not all are there"),
        (SlotBlocks(0, 0, (-1,)), "not all are there"),
    ],
)
def test_a_table_that_names_what_is_not_there_is_refused(change: SlotBlocks, words: str) -> None:
    with pytest.raises(BusProtocolError, match=words):
        BlockTable(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, num_blocks=NUM_BLOCKS).change([change])


def test_of_changes_of_one_part_the_last_one_counts() -> None:
    blocks = BlockTable(num_slots=2, slot_tokens=64, num_blocks=9)
    blocks.change([SlotBlocks(1, 0, (1, 2, 3)), SlotBlocks(1, 0, ()), SlotBlocks(1, 0, (7,)), SlotBlocks(1, 1, (5,))])
    assert blocks.tensor[1].tolist() == [7, 5, 9, 9], "what was given up is nobody's"


def test_a_row_behind_the_blocks_of_its_slot_is_refused() -> None:
    """It would write to whoever has them now."""
    blocks = BlockTable(num_slots=2, slot_tokens=64, num_blocks=9)
    blocks.change([SlotBlocks(1, 0, (1, 2, 3)), SlotBlocks(1, 2, ())])
    blocks.check([plan_row(1, 20, 12)])
    for row in (plan_row(1, 20, 13), plan_row(0, 0, 1)):
        with pytest.raises(BusProtocolError, match=f"PlanRow of slot {row.slot} ends at"):
            blocks.check([row])


def test_chunks_become_tiles_between_single_tokens() -> None:
    bounds = BatchBounds(num_slots=4, slot_tokens=16, tiling=Tiling(tile_tokens=3))
    batch = build_step_batch([plan_row(0, 4, 1), plan_row(1, 2, 7), plan_row(2, 0, 1)], 10, bounds)
    assert batch.prefill_tiles == ((1, 3, 1, 2), (4, 3, 1, 5), (7, 1, 1, 8))
    assert batch.decode_tiles == ((0, 1, 0, 4), (8, 1, 2, 0), (9, 1, -1, 0))
    assert batch.tokens[1:8] == tuple((1, position) for position in range(2, 9))


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


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler on the path: install gcc")
def test_loading_leaves_denormal_numbers_alone() -> None:
    """Code linked for fast math would flush them to zero in the whole process."""
    program = (
        "import torch\n"
        "from stageline_runtime.native.build import load_library\n"
        "load_library()\n"
        "assert torch.tensor([1e-40]).mul(0.5).item() > 0, 'denormal numbers are flushed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
