"""Triton kernels over the paged cache: store a step's keys and values, attend tiles of queries, add up split contexts.

A tile is up to a few consecutive tokens of one request and all query heads that share a key/value head, folded into
one block of rows, so that each key is read once. Everything that changes from step to step is read from device memory,
never given as an argument: a captured launch stays right for the next plan. Sums are kept in float32. No position that
a query may not see is ever read, so what an earlier request left in a slot can't reach this one.

Where a table begins and how wide a window is are not compiled in, so that no plan needs a compilation of its own while
peers wait. The online softmax is that of Milakov and Gimelshein 2018 (arXiv 1805.02867); splitting a long context over
programs and adding the parts up follows Flash-Decoding (Dao et al. 2023).
"""

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(4)
"""Columns of a tile: first token, number of tokens, slot (-1: padding), position of the first token."""
TOKEN_FIELDS = tl.constexpr(2)
"""Columns of a token: slot (-1: padding), position."""


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def store_tokens(
    query_key,
    value,
    keys,
    values,
    tokens,
    block_table,
    query_key_stride,
    value_stride,
    blocks_per_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Copy token `program_id(0)`'s key and value of head `program_id(1)` to its place in the cache; padding to none."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(tokens + token * TOKEN_FIELDS).to(tl.int64)
    position = tl.load(tokens + token * TOKEN_FIELDS + 1)
    column = tl.arange(0, BLOCK_D)
    real = (column < HEAD_DIM) & (slot >= 0)
    block = tl.load(block_table + slot * blocks_per_slot + position // BLOCK_TOKENS, mask=slot >= 0, other=0)
    place = ((block.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM + column
    key = tl.load(query_key + token * query_key_stride + (NUM_HEADS + head) * HEAD_DIM + column, mask=real)
    tl.store(keys + place, key, mask=real)
    new = tl.load(value + token * value_stride + head * HEAD_DIM + column, mask=real)
    tl.store(values + place, new, mask=real)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["tiles"])
def attend_tiles(
    query,
    keys,
    values,
    tiles,
    block_table,
    output,
    partial_sums,
    partial_scales,
    query_stride,
    blocks_per_slot,
    window,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
):
    """Attend tile `program_id(0)`, key/value head `program_id(1)`, part `program_id(2)` of the context.

    With one split the result goes to `output`; with more, unnormalised sums, maxima and weights go to the partials.
    `window` 0 means none. `WIDE_PRODUCTS` multiplies in float32 what is stored narrower: Triton's interpreter can't
    multiply bfloat16.
    """
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first_token = tl.load(tiles + tile * TILE_FIELDS).to(tl.int64)
    count = tl.load(tiles + tile * TILE_FIELDS + 1)
    slot = tl.load(tiles + tile * TILE_FIELDS + 2).to(tl.int64)
    position = tl.load(tiles + tile * TILE_FIELDS + 3)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    token_of_row = row // GROUP
    head_of_row = head * GROUP + row % GROUP
    in_tile = token_of_row < count
    is_real = in_tile[:, None] & (column < HEAD_DIM)[None, :]
    place = head_of_row[:, None] * HEAD_DIM + column[None, :]
    rows = tl.load(query + (first_token + token_of_row)[:, None] * query_stride + place, mask=is_real, other=0.0)
    if WIDE_PRODUCTS:
        rows = rows.to(tl.float32)

    begin, end = _blocks_of_split(slot, position, count, window, split, BLOCK_N, SPLITS)
    blocks = block_table + slot * blocks_per_slot
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(begin, end):
        seen = block * BLOCK_N + tl.arange(0, BLOCK_N)
        there = seen < position + count
        page = tl.load(blocks + seen // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
        place_in_cache = (page * NUM_KV_HEADS + head) * BLOCK_TOKENS + seen % BLOCK_TOKENS
        at = place_in_cache[:, None] * HEAD_DIM + column[None, :]
        in_cache = there[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(keys + at, mask=in_cache, other=0.0)
        if WIDE_PRODUCTS:
            key = key.to(tl.float32)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale
        scores = _hide_unseen(scores, seen, position + token_of_row, in_tile, window)
        most, weight, sums = _take_in(most, weight, sums, scores, values + at, in_cache, WIDE_PRODUCTS)

    if SPLITS == 1:
        result = sums / tl.where(weight > 0.0, weight, 1.0)[:, None]
        at_output = (first_token + token_of_row)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + place
        tl.store(output + at_output, result.to(output.dtype.element_ty), mask=is_real)
    else:
        part = (tile * NUM_KV_HEADS * GROUP + head_of_row) * SPLITS + split
        tl.store(partial_sums + part[:, None] * HEAD_DIM + column[None, :], sums, mask=is_real)
        tl.store(partial_scales + part * 2, most, mask=in_tile)
        tl.store(partial_scales + part * 2 + 1, weight, mask=in_tile)


@triton.jit
def _blocks_of_split(slot, position, count, window, split, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """The blocks `[begin, end)` of a tile's context that part `split` reads; none for padding."""
    first_seen = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    first_block = first_seen // BLOCK_N
    num_blocks = tl.where(slot >= 0, (position + count + BLOCK_N - 1) // BLOCK_N - first_block, 0)
    blocks_of_split = (num_blocks + SPLITS - 1) // SPLITS
    begin = first_block + split * blocks_of_split
    return begin, tl.minimum(begin + blocks_of_split, first_block + num_blocks)


@triton.jit
def _hide_unseen(scores, seen, own_position, in_tile, window):
    """Scores `[BLOCK_M, BLOCK_N]`, minus infinity where a row may not see: behind itself, or out of its window."""
    visible = (seen[None, :] <= own_position[:, None]) & in_tile[:, None]
    visible = visible & ((window <= 0) | (seen[None, :] > own_position[:, None] - window))
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _take_in(most, weight, sums, scores, contents, in_cache, WIDE_PRODUCTS: tl.constexpr):
    """Add a block's values to the online softmax: each row's maximum, weight and unnormalised sum so far."""
    higher = tl.maximum(most, tl.max(scores, 1))
    # A row that has seen nothing yet has no maximum to subtract.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - level[:, None])
    fade = tl.exp(most - level)
    weight = weight * fade + tl.sum(weights, 1)
    content = tl.load(contents, mask=in_cache, other=0.0)
    weights = weights.to(content.dtype)
    if WIDE_PRODUCTS:
        weights, content = weights.to(tl.float32), content.to(tl.float32)
    sums = sums * fade[:, None] + tl.dot(weights, content, input_precision="ieee")
    return higher, weight, sums


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def add_splits(
    partial_sums,
    partial_scales,
    tiles,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add up the parts of single-token tile `program_id(0)`, query head `program_id(1)`; zero for padding."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(tiles + tile * TILE_FIELDS).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    part = (tile * NUM_HEADS + head) * SPLITS + split
    most = tl.load(partial_scales + part * 2, mask=split < SPLITS, other=float("-inf"))
    weight = tl.load(partial_scales + part * 2 + 1, mask=split < SPLITS, other=0.0)
    highest = tl.max(most, 0)
    fade = tl.exp(most - tl.where(highest == float("-inf"), 0.0, highest))
    is_real = (split < SPLITS)[:, None] & (column < HEAD_DIM)[None, :]
    sums = tl.load(partial_sums + part[:, None] * HEAD_DIM + column[None, :], mask=is_real, other=0.0)
    total = tl.sum(weight * fade, 0)
    result = tl.sum(sums * fade[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    at_output = token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    tl.store(output + at_output, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)
