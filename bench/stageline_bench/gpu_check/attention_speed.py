"""Attention times of one layer on a device, in the shape of an 8B model: decode, one long row among many, prefill.

Prefill is compared with torch's own attention over contiguous keys, which a paged cache can't have: a lower bound.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stageline_bench.gpu_check.attention_cases import device_rows
from stageline_bench.gpu_check.device_times import median_microseconds
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.device.attention import TritonAttention, device_tiling
from stageline_runtime.models.layers.attention import AttentionHeads
from stageline_runtime.models.layers.step_batch import BatchBounds, build_step_batch
from stageline_runtime.plan_bus.messages import PlanRow
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LONG = 32_768
PREFILLS = (2_048, 8_192, LONG)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True, slots=True)
class Rows:
    """A plan's rows: cached tokens before each, and new tokens of each."""

    name: str
    rows: tuple[tuple[int, int], ...]


DECODES = (
    Rows("64 rows of 1k", ((1_023, 1),) * 64),
    Rows("64 rows of 8k", ((8_191, 1),) * 64),
    Rows("one row of 32k among 64 of 1k", ((LONG - 1, 1), *((1_023, 1),) * 63)),
    Rows("one row of 32k", ((LONG - 1, 1),)),
)


def figures(accelerator: Accelerator) -> dict[str, str]:
    """Microseconds of a layer's attention by case."""
    found = {case.name: f"{_paged(case, accelerator):.0f} µs" for case in DECODES}
    for tokens in PREFILLS:
        own = _paged(Rows("prefill", ((0, tokens),)), accelerator)
        beside = {name: _contiguous(tokens, accelerator, backend) for name, backend in BACKENDS.items()}
        others = ", ".join(f"{name} {said}" for name, said in beside.items())
        found[f"prefill of {tokens // 1024}k"] = f"{own:.0f} µs ({others})"
    return found


def _paged(case: Rows, accelerator: Accelerator) -> float:
    device = accelerator.device
    heads = AttentionHeads(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
    tiling = device_tiling(heads, accelerator.num_processors)
    bounds = BatchBounds(num_slots=len(case.rows), slot_tokens=LONG, tiling=tiling)
    plan = [
        PlanRow(slot, 1, position, count, (), need_sample=False) for slot, (position, count) in enumerate(case.rows)
    ]
    step = build_step_batch(plan, sum(count for _, count in case.rows), bounds)
    table, num_blocks = _block_table(case, device)
    shape = (num_blocks + 1, NUM_KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    cache = tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    query_key = torch.randn(step.padded_tokens, NUM_HEADS + NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    value = torch.randn(step.padded_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    attention, rows = TritonAttention(heads, accelerator.num_processors), device_rows(step, table)
    rotary = query_key, query_key  # heads are rotated already

    def attend() -> torch.Tensor:
        return attention(query_key, value, rotary, (cache[0], cache[1]), rows, None)

    return median_microseconds(accelerator, attend)


def _block_table(case: Rows, device: torch.device) -> tuple[torch.Tensor, int]:
    """Each slot's blocks for its tokens, in random order; the last row is the padding's."""
    needed = [blocks_of(position + count) for position, count in case.rows]
    num_blocks = sum(needed)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = torch.full((len(needed) + 1, blocks_of(LONG)), num_blocks, dtype=torch.int32)
    for slot, (blocks, end) in enumerate(zip(needed, itertools.accumulate(needed), strict=True)):
        table[slot, :blocks] = order[end - blocks : end]
    return table.to(device), num_blocks


def _contiguous(tokens: int, accelerator: Accelerator, backend: SDPBackend) -> str:
    """torch's attention of one prompt by a backend, or why it is unavailable."""
    device = accelerator.device
    query = torch.randn(1, NUM_HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(1, NUM_KV_HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(2))

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return _microseconds_or_none(accelerator, attend)


def _microseconds_or_none(accelerator: Accelerator, work: Callable[[], torch.Tensor]) -> str:
    try:
        return f"{median_microseconds(accelerator, work):.0f} µs"
    except RuntimeError as error:  # this build or this card lacks the kernel
        return f"none: {str(error).splitlines()[0][:60]}"
