"""A slot's content between two requests: kept in part, copied from another slot, or given back with its memory."""

import os
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_runtime.models.cpu.kv_cache import AttentionBatch, CacheShape, KvCache, build_attention_batch
from stageline_runtime.plan_bus.messages import PlanRow

SLOT_TOKENS = 64
NUM_HEADS = 2


def make_cache(num_slots: int = 3, slot_tokens: int = SLOT_TOKENS, head_dim: int = 4) -> KvCache:
    return KvCache(
        num_layers=2,
        num_slots=num_slots,
        num_kv_heads=NUM_HEADS,
        slot_tokens=slot_tokens,
        head_dim=head_dim,
        dtype=torch.float32,
    )


def batch_of(slot: int, start: int, num_tokens: int, slot_tokens: int = SLOT_TOKENS) -> AttentionBatch:
    shape = CacheShape(num_slots=3, slot_tokens=slot_tokens, group_size=1, dtype=torch.float32)
    return build_attention_batch([PlanRow(slot, 1, start, num_tokens, (), False)], num_tokens, shape)


def write(cache: KvCache, slot: int, start: int, content: torch.Tensor) -> None:
    """Store rows `[num_tokens, num_heads, head_dim]` in both layers, values negated."""
    batch = batch_of(slot, start, len(content), cache.keys[0].shape[2])
    cache.mark_written(batch)
    for layer in range(2):
        cache.write(layer, content, -content, batch)


def content_of(cache: KvCache, slot: int) -> list[torch.Tensor]:
    """Keys of both layers, `[slot_tokens, num_heads, head_dim]`; checks the values on the way."""
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert torch.equal(keys[slot], -values[slot])
    return [keys[slot].transpose(0, 1) for keys in cache.keys]


@settings(max_examples=60, deadline=None)
@given(
    written=st.lists(st.integers(0, SLOT_TOKENS), min_size=3, max_size=3),
    steps=st.lists(
        st.tuples(st.sampled_from(["reset", "copy", "trim"]), st.permutations([0, 1, 2]), st.integers(0, SLOT_TOKENS)),
        max_size=6,
    ),
)
def test_slots_hold_what_was_kept_and_zeros_behind(written: list[int], steps: list[tuple[str, list[int], int]]) -> None:
    """Against a model of three lists; what was written is never zero, so each position tells."""
    cache = make_cache()
    held = [torch.zeros(0, NUM_HEADS, 4) for _ in written]
    for slot, count in enumerate(written):
        if count:
            held[slot] = torch.arange(1, count * NUM_HEADS * 4 + 1).view(count, NUM_HEADS, 4) + 1000.0 * slot
            write(cache, slot, 0, held[slot])
    for operation, (slot, other, _), count in steps:
        match operation:
            case "reset":
                cache.reset_slot(slot, count)
                held[slot] = held[slot][:count]
            case "trim":
                cache.trim_slot(slot, count)
                held[slot] = held[slot][:count]
            case "copy":
                cache.reset_slot(slot)
                cache.copy_slot(other, slot, min(count, len(held[other])))
                held[slot] = held[other][:count]
    for slot, expected in enumerate(held):
        for found in content_of(cache, slot):
            assert torch.equal(found[: len(expected)], expected)
            assert not found[len(expected) :].any()


def test_a_trimmed_slot_gives_its_memory_back() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    slot_tokens, head_dim = 8192, 128
    cache = make_cache(slot_tokens=slot_tokens, head_dim=head_dim)
    write(cache, 1, 0, torch.ones(slot_tokens, NUM_HEADS, head_dim))
    full = resident_bytes()
    cache.trim_slot(1, 100)
    # Keys and values of two layers, 8 MiB each.
    assert full - resident_bytes() > 24 << 20
    assert cache.keys[1][1, :, :100].all()
    assert not cache.keys[1][1, :, 100:].any()
    write(cache, 1, 100, torch.full((3, NUM_HEADS, head_dim), 2.0))
    assert cache.values[0][1, 1, 99:104, 0].tolist() == [-1.0, -2.0, -2.0, -2.0, 0.0]
