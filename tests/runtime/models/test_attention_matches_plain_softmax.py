"""Attention over slots equals a plain softmax per request, and one request's slot never touches another's."""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_runtime.models.cpu.kv_cache import AttentionBatch, CacheShape, KvCache, build_attention_batch
from stageline_runtime.models.cpu.layer_attention import attend
from stageline_runtime.plan_bus.messages import PlanRow

NUM_SLOTS, SLOT_TOKENS, KV_HEADS, GROUP_SIZE, HEAD_DIM = 6, 150, 2, 3, 8
SHAPE = CacheShape(num_slots=NUM_SLOTS, slot_tokens=SLOT_TOKENS, group_size=GROUP_SIZE, dtype=torch.float32)


def plan_row(slot: int, position: int, num_tokens: int) -> PlanRow:
    return PlanRow(slot=slot, generation=1, position=position, num_tokens=num_tokens, token_ids=(), need_sample=False)


def filled_cache(seed: int) -> KvCache:
    cache = KvCache(
        num_layers=1,
        num_slots=NUM_SLOTS,
        num_kv_heads=KV_HEADS,
        slot_tokens=SLOT_TOKENS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_(generator=generator)
    return cache


def plain_attention(query: torch.Tensor, cache: KvCache, row: PlanRow, offset: int) -> torch.Tensor:
    """One request's tokens, one by one, one head by one."""
    outputs = []
    for index in range(row.num_tokens):
        visible = row.position + index + 1
        heads = []
        for head in range(KV_HEADS * GROUP_SIZE):
            keys = cache.keys[0][row.slot, head // GROUP_SIZE, :visible]
            values = cache.values[0][row.slot, head // GROUP_SIZE, :visible]
            weights = (keys @ query[offset + index, head] / math.sqrt(HEAD_DIM)).softmax(dim=0)
            heads.append(weights @ values)
        outputs.append(torch.cat(heads))
    return torch.stack(outputs)


@st.composite
def plans(draw: st.DrawFn) -> list[PlanRow]:
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
    rows = []
    for slot in slots:
        num_tokens = draw(st.sampled_from([1, 1, 1, 2, 5, 65, 130]))
        rows.append(plan_row(slot, draw(st.integers(0, SLOT_TOKENS - num_tokens)), num_tokens))
    return rows


@settings(max_examples=80, deadline=None)
@given(rows=plans(), padding=st.integers(0, 5), seed=st.integers(0, 100))
def test_any_mix_of_rows_attends_and_writes_like_plain_code(rows: list[PlanRow], padding: int, seed: int) -> None:
    num_tokens = sum(row.num_tokens for row in rows)
    batch = build_attention_batch(rows, num_tokens + padding, SHAPE)
    cache = filled_cache(seed)
    before_keys, before_values = cache.keys[0].clone(), cache.values[0].clone()
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(num_tokens + padding, KV_HEADS * GROUP_SIZE, HEAD_DIM, generator=generator)
    key = torch.randn(num_tokens + padding, KV_HEADS, HEAD_DIM, generator=generator)
    value = torch.randn(num_tokens + padding, KV_HEADS, HEAD_DIM, generator=generator)

    cache.write(0, key, value, batch)
    attended = attend(query, cache.keys[0], cache.values[0], batch)

    offset = 0
    for row in rows:
        tokens = slice(offset, offset + row.num_tokens)
        positions = slice(row.position, row.position + row.num_tokens)
        assert torch.equal(cache.keys[0][row.slot, :, positions], key[tokens].transpose(0, 1))
        assert torch.equal(cache.values[0][row.slot, :, positions], value[tokens].transpose(0, 1))
        torch.testing.assert_close(attended[tokens], plain_attention(query, cache, row, offset))
        assert batch.positions[tokens].tolist() == list(range(positions.start, positions.stop))
        before_keys[row.slot, :, positions] = key[tokens].transpose(0, 1)
        before_values[row.slot, :, positions] = value[tokens].transpose(0, 1)
        offset += row.num_tokens
    assert torch.equal(cache.keys[0], before_keys), "something else was written"
    assert torch.equal(cache.values[0], before_values), "something else was written"


def test_a_reset_slot_hides_what_an_earlier_request_left_behind() -> None:
    """A masked position still multiplies its value by zero, and zero times NaN is NaN."""
    cache = KvCache(
        num_layers=1, num_slots=2, num_kv_heads=1, slot_tokens=SLOT_TOKENS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    shape = CacheShape(num_slots=2, slot_tokens=SLOT_TOKENS, group_size=1, dtype=torch.float32)
    write_step(cache, build_attention_batch([plan_row(1, 0, 40)], 40, shape), float("nan"))
    cache.reset_slot(1)
    batch = build_attention_batch([plan_row(1, 0, 1)], 1, shape)
    write_step(cache, batch, 1.0)
    output = attend(torch.ones(1, 1, HEAD_DIM), cache.keys[0], cache.values[0], batch)
    assert output.tolist() == [[1.0] * HEAD_DIM]


def write_step(cache: KvCache, batch: AttentionBatch, content: float) -> None:
    rows = torch.full((len(batch.positions), 1, HEAD_DIM), content)
    cache.mark_written(batch)
    cache.write(0, rows, rows, batch)


def test_an_unused_cache_occupies_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    cache = KvCache(num_layers=2, num_slots=64, num_kv_heads=4, slot_tokens=4096, head_dim=64, dtype=torch.bfloat16)
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 512 << 20
    assert not cache.keys[1][3, 2, 1].any()
    assert resident_bytes() - before < 64 << 20


def test_a_step_without_rows_touches_nothing() -> None:
    batch = build_attention_batch([], 4, SHAPE)
    cache = filled_cache(0)
    before = cache.keys[0].clone()
    key = torch.ones(4, KV_HEADS, HEAD_DIM)
    cache.write(0, key, key, batch)
    output = attend(torch.ones(4, KV_HEADS * GROUP_SIZE, HEAD_DIM), cache.keys[0], cache.values[0], batch)
    assert torch.equal(cache.keys[0], before)
    assert not output.any()


@pytest.mark.parametrize(
    "row",
    [plan_row(NUM_SLOTS, 0, 1), plan_row(-1, 0, 1), plan_row(0, SLOT_TOKENS, 1), plan_row(0, SLOT_TOKENS - 1, 2)],
)
def test_a_row_outside_the_cache_is_refused(row: PlanRow) -> None:
    with pytest.raises(ValueError, match="slot"):
        build_attention_batch([row], 4, SHAPE)


def test_rows_that_outgrow_the_padding_are_refused() -> None:
    with pytest.raises(ValueError, match="padded to 2"):
        build_attention_batch([plan_row(0, 0, 3)], 2, SHAPE)
