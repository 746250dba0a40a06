"""The attention kernels compared with plain torch, over many shapes: on a GPU, or on the CPU in Triton's interpreter.

`TRITON_INTERPRET=1 python -m stageline_bench.gpu_check.attention_cases` prints each case's error as JSON. It is a
separate program, because Triton chooses the interpreter when it is imported.
"""

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stageline_runtime.models.device.attention import TritonAttention, device_tiling
from stageline_runtime.models.layers.attention import AttentionHeads, PlainAttention
from stageline_runtime.models.layers.step_batch import BatchBounds, StepBatch, StepTensors, build_step_batch
from stageline_runtime.models.protocol import CPU
from stageline_runtime.plan_bus.messages import PlanRow
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

NUM_SLOTS = 5
SLOT_TOKENS = 160
LONG_SLOT_TOKENS = 2_400
DECODE = ((0, 5, 1), (3, 100, 1), (2, 0, 1), (4, 159, 1))
LONG_AMONG_SHORT = ((0, 70, 1), (3, 2_399, 1), (2, 0, 1), (4, 130, 1))
MIXED = ((1, 0, 7), (0, 63, 1), (2, 37, 41), (3, 64, 64))
HEADS = ((4, 4, 16), (4, 2, 32), (9, 3, 64), (7, 1, 80), (6, 1, 128), (16, 1, 24))
"""Query heads, key/value heads, head size."""
WINDOWS = (1, None, 20, 64)


TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}
"""A few roundings of results of size 1 to 4."""


@dataclass(frozen=True)
class Case:
    """One comparison; `processors` decides into how many parts a context is split."""

    heads: tuple[int, int, int]
    dtype: str
    rows: tuple[tuple[int, int, int], ...]
    padding: int
    window: int | None
    processors: int
    slot_tokens: int = SLOT_TOKENS


def cases() -> list[Case]:
    """Every shape in float32, a part of them narrower."""
    both = ((DECODE, 4), (MIXED, 1))
    wide = [
        Case(heads, "float32", rows, 3, window, processors)
        for heads, window, (rows, processors) in itertools.product(HEADS, WINDOWS[1:3], both)
    ]
    wide += [
        Case(HEADS[2], "float32", rows, 3, window, processors)
        for window, (rows, processors) in itertools.product(WINDOWS[::3], both)
    ]
    narrow = [
        Case(heads, dtype, rows, 2, 20, processors)
        for heads, dtype, (rows, processors) in itertools.product(HEADS[1:4], ("bfloat16", "float16"), both)
    ]
    return [
        *wide,
        *narrow,
        Case(HEADS[2], "float32", DECODE[:1], 0, None, 1),
        Case(HEADS[2], "float32", (), 4, None, 9),
        *(Case(HEADS[3], "float32", LONG_AMONG_SHORT, 130, window, 4, LONG_SLOT_TOKENS) for window in (None, 300)),
    ]


def device_rows(rows: StepBatch, block_table: torch.Tensor) -> StepTensors:
    """A plan's table on the block table's device."""
    sections = ((rows.tokens, 2), (rows.decode_tiles, 4), (rows.decode_parts, 2), (rows.prefill_tiles, 4))
    tokens, decode, parts, prefill = (
        torch.tensor(part, dtype=torch.int32, device=block_table.device).view(-1, width) for part, width in sections
    )
    return StepTensors(
        tokens=tokens, decode_tiles=decode, decode_parts=parts, prefill_tiles=prefill, block_table=block_table
    )


def run(case: Case, device: torch.device = CPU) -> dict[str, Any]:
    """Errors of the output, and whether both wrote the same cache. Cache entries that no query may read are NaN."""
    generator = torch.Generator().manual_seed(7)
    num_heads, num_kv_heads, head_dim = case.heads
    size = case.slot_tokens
    dtype: torch.dtype = getattr(torch, case.dtype)
    heads = AttentionHeads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    bounds = BatchBounds(num_slots=NUM_SLOTS, slot_tokens=size, tiling=device_tiling(heads, case.processors))
    plan = [PlanRow(slot, 1, position, count, (), need_sample=False) for slot, position, count in case.rows]
    step = build_step_batch(plan, sum(row.num_tokens for row in plan) + case.padding, bounds)
    slot_blocks = size // BLOCK_TOKENS
    num_blocks = NUM_SLOTS * slot_blocks
    shape = (num_blocks + 1, num_kv_heads, BLOCK_TOKENS, head_dim)
    cache = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = torch.cat((order, torch.full((slot_blocks,), num_blocks, dtype=torch.int32))).view(-1, slot_blocks)
    for slot, position, count in case.rows:
        for part, unseen in itertools.product(cache, range(position + count, size)):
            part[table[slot, unseen // BLOCK_TOKENS], :, unseen % BLOCK_TOKENS] = float("nan")
    tokens = step.padded_tokens
    query_key = torch.randn(tokens, num_heads + num_kv_heads, head_dim, generator=generator).to(dtype)
    value = torch.randn(tokens, num_kv_heads, head_dim, generator=generator).to(dtype)
    # All drawn on the CPU, so that every device gets the same numbers.
    cache, table = [part.to(device) for part in cache], table.to(device)
    query_key, value = query_key.to(device), value.to(device)
    copies = [part.clone() for part in cache]
    rotary = query_key, query_key  # neither rotates
    plain, attention = PlainAttention(heads), TritonAttention(heads, case.processors)
    expected = plain(query_key, value, rotary, (cache[0], cache[1]), device_rows(step, table), case.window)
    actual = attention(query_key, value, rotary, (copies[0], copies[1]), device_rows(step, table), case.window)
    same = all(torch.equal(a[:-1].nan_to_num(9.0), b[:-1].nan_to_num(9.0)) for a, b in zip(cache, copies, strict=True))
    return {
        "case": asdict(case),
        "splits": max((position // step.part_tokens + 1 for *_, position in step.decode_tiles), default=0),
        "error": (expected.float() - actual.float()).abs().max().item(),
        "size": expected.float().abs().max().item(),
        "same_cache": same,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump([run(case) for case in cases()], sys.stdout)
