"""Triton kernels for a layer's row operations: RMS norm, rotation of heads, the feed-forward gate.

Each replaces two to thirteen plain operators by one launch; every operator costs a device about 1.5 µs however few
its rows are: two for the gate, five for the rotation, eight for the norm, nine with its sum, thirteen for the
rotation behind a norm. Roundings are the plain operators': values that they write to memory in the model's dtype are
rounded here too, so that results differ where a last bit does: from the order of a sum, or an exponential or square
root that is approximate. Everything is multiplied in float32, since Triton's interpreter can't multiply bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def normalise_rows(
    rows,
    addend,
    weight,
    output,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    """Row `program_id(0)` to `row / rms(row) * weight`; with an addend of their sum, which takes the addend's place."""
    column = tl.arange(0, BLOCK)
    real = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    row = tl.load(rows + place, mask=real, other=0.0)
    dtype = row.dtype
    if HAS_ADDEND:
        row = (row.to(tl.float32) + tl.load(addend + place, mask=real, other=0.0).to(tl.float32)).to(dtype)
        tl.store(addend + place, row, mask=real)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    weights = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(output + place, (weights * normed).to(dtype), mask=real)


@triton.jit
def rotate_heads(
    heads,
    cosines,
    sines,
    weight,
    output,
    heads_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Rotate heads `program_id(1) * BLOCK_HEADS …` of token `program_id(0)`, behind their norm where they have one."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    real = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(heads + token * heads_stride + place, mask=real, other=0.0)
    second = tl.load(heads + token * heads_stride + place + HALF, mask=real, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        weights = tl.load(weight + place, mask=real, other=0.0).to(tl.float32)
        first = (weights * (first * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        weights = tl.load(weight + place + HALF, mask=real, other=0.0).to(tl.float32)
        second = (weights * (second * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    angle = token * (2 * HALF) + column
    in_half = column < HALF
    cosine = tl.load(cosines + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned = (first * cosine).to(dtype).to(tl.float32) - (second * sine).to(dtype).to(tl.float32)
    at_output = output + token * (NUM_HEADS * 2 * HALF) + place
    tl.store(at_output, turned.to(dtype), mask=real)
    cosine = tl.load(cosines + angle + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angle + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned = (second * cosine).to(dtype).to(tl.float32) + (first * sine).to(dtype).to(tl.float32)
    tl.store(at_output + HALF, turned.to(dtype), mask=real)


@triton.jit
def gate_rows(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`silu(gate) * up` of row `program_id(0)` `[gate, up]`, columns `program_id(1) * BLOCK …`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=real, other=0.0)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=real, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * SIZE + column, (opened * up).to(gate.dtype), mask=real)
