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
PART_FIELDS = tl.constexpr(2)
"""Columns of a decode tile's part: spare parts of the tiles before it, positions in a part."""
BLOCK_S = tl.constexpr(32)
"""Parts that are added up together."""
BLOCK_TILES = tl.constexpr(128)
"""Tiles among which a spare part looks for its own together."""


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


@triton.jit(
    do_not_specialize=["num_tiles", "window"],
    do_not_specialize_on_alignment=["tiles", "parts"],
)
def attend_tiles(
    query,
    keys,
    values,
    tiles,
    parts,
    block_table,
    output,
    partial_sums,
    partial_scales,
    num_tiles,
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
    IN_PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
):
    """Attend tile `program_id(0)`, key/value head `program_id(1)`.

    `IN_PARTS`: each tile is one token; its context may have several parts. Program `program_id(0)` then attends the
    first part of its tile or, behind the tiles, a spare part; a program that has none leaves. Unnormalised sums, maxima
    and weights of the parts go to the partials. A context of one part goes to `output`, as without parts.
    `window` 0 means none. `WIDE_PRODUCTS` multiplies narrower types in float32: Triton's interpreter can't
    multiply bfloat16.
    """
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = 0
    if IN_PARTS:
        tile, split = _tile_and_split(parts, tile, num_tiles)
    first_token = tl.load(tiles + tile * TILE_FIELDS).to(tl.int64)
    count = tl.load(tiles + tile * TILE_FIELDS + 1)
    slot = tl.load(tiles + tile * TILE_FIELDS + 2).to(tl.int64)
    position = tl.load(tiles + tile * TILE_FIELDS + 3)
    begin, end = _blocks_of_tile(slot, position, count, window, BLOCK_N)
    if IN_PARTS:
        part_tokens = tl.load(parts + tile * PART_FIELDS + 1)
        if split > position // part_tokens:
            return
        begin = tl.maximum(begin, split * part_tokens // BLOCK_N)
        end = tl.minimum(end, (split + 1) * part_tokens // BLOCK_N)

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

    is_whole = True
    if IN_PARTS:
        is_whole = position < part_tokens
        first_part = _first_partial(parts, tile)
        part = (first_part + split) * NUM_KV_HEADS * GROUP + head_of_row
        in_part = in_tile & (is_whole == 0)
        tl.store(partial_sums + part[:, None] * HEAD_DIM + column[None, :], sums, mask=is_real & in_part[:, None])
        tl.store(partial_scales + part * 2, most, mask=in_part)
        tl.store(partial_scales + part * 2 + 1, weight, mask=in_part)
    result = sums / tl.where(weight > 0.0, weight, 1.0)[:, None]
    at_output = (first_token + token_of_row)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + place
    tl.store(output + at_output, result.to(output.dtype.element_ty), mask=is_real & is_whole)


@triton.jit
def _tile_and_split(parts, program, num_tiles):
    """The tile and the part of its context that a program attends: behind the tiles' own programs, the spare parts.

    A spare part is of the last tile that has no more of them before it.
    """
    spare = program - num_tiles
    count = tl.full((), 0, tl.int64)
    if spare >= 0:
        for first in range(0, num_tiles, BLOCK_TILES):
            tile = first + tl.arange(0, BLOCK_TILES)
            before = tl.load(parts + tile * PART_FIELDS, mask=tile < num_tiles, other=0)
            count += tl.sum(((before <= spare) & (tile < num_tiles)).to(tl.int32), 0)
    tile = tl.where(spare >= 0, count - 1, program)
    own = spare - tl.load(parts + tile * PART_FIELDS) + 1
    return tile, tl.where(spare >= 0, own, 0).to(tl.int32)


@triton.jit
def _first_partial(parts, tile):
    """Where a tile's partials begin: one that has some has as many as its spare parts and one more."""
    return tl.load(parts + tile * PART_FIELDS).to(tl.int64) * 2


@triton.jit
def _blocks_of_tile(slot, position, count, window, BLOCK_N: tl.constexpr):
    """The blocks `[begin, end)` of a tile's context that it sees; none for padding."""
    first_seen = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    return first_seen // BLOCK_N, tl.where(slot >= 0, (position + count + BLOCK_N - 1) // BLOCK_N, 0)


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


@triton.jit(do_not_specialize_on_alignment=["tiles", "parts"])
def add_parts(
    partial_sums,
    partial_scales,
    tiles,
    parts,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the parts of single-token tile `program_id(0)`, query head `program_id(1)`, if it has several."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(tiles + tile * TILE_FIELDS).to(tl.int64)
    position = tl.load(tiles + tile * TILE_FIELDS + 3)
    part_tokens = tl.load(parts + tile * PART_FIELDS + 1)
    if position < part_tokens:
        return
    num_parts = position // part_tokens + 1
    first_part = _first_partial(parts, tile)
    column = tl.arange(0, BLOCK_D)
    most = tl.full((), float("-inf"), tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_parts, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        is_part = split < num_parts
        part = (first_part + split) * NUM_HEADS + head
        level = tl.load(partial_scales + part * 2, mask=is_part, other=float("-inf"))
        weights = tl.load(partial_scales + part * 2 + 1, mask=is_part, other=0.0)
        is_real = is_part[:, None] & (column < HEAD_DIM)[None, :]
        new = tl.load(partial_sums + part[:, None] * HEAD_DIM + column[None, :], mask=is_real, other=0.0)
        higher = tl.maximum(most, tl.max(level, 0))
        # Parts that lie before the window have seen nothing: they have no maximum.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        scale, fade = tl.exp(level - base), tl.exp(most - base)
        weight = weight * fade + tl.sum(weights * scale, 0)
        sums = sums * fade + tl.sum(new * scale[:, None], 0)
        most = higher
    result = sums / tl.where(weight > 0.0, weight, 1.0)
    at_output = token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    tl.store(output + at_output, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)
