"""Triton kernels that draw one token per row as `sampler` does: from the same noise, by the same rules of `truncation`.

`scan_rows` reads every logit once, by several programs per row. It takes the tokens in the blocks of 32 of `noise`: a
block's highest logit and its largest noise bound what any of its tokens can reach, so that few blocks are looked at
token by token. `settle_rows`, one program per row, takes the best of these tokens. Where top-k, top-p or min-p drop it,
all that stands behind it in the row's order is dropped too, and it draws again from what stands before. The blocks that
hold a logit of at least some value are known from `scan_rows`; the others are never read again.

Every number that depends on a request lies in device memory, so that no plan needs a compilation of its own.
"""

import triton
import triton.language as tl

from stageline_runtime.sampling import noise
from stageline_runtime.sampling.truncation import MASS_TOLERANCE

BLOCK_SIZE = tl.constexpr(noise.BLOCK_SIZE)
BLOCK_COUNTER = tl.constexpr(noise.BLOCK_COUNTER)
INCREMENT = tl.constexpr(noise.INCREMENT)
FIRST_MULTIPLIER = tl.constexpr(noise.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(noise.SECOND_MULTIPLIER)
TOLERANCE = tl.constexpr(MASS_TOLERANCE)
ROW_FIELDS = tl.constexpr(5)
"""Columns of a row: its mixed key, the bits of temperature (0: greedy), top-p and min-p, and top-k."""
LOWEST_KEY = tl.constexpr(-2139095041)
"""Of minus infinity."""
LEVEL_HALVINGS = tl.constexpr(12)
"""Of the range of logits in which the level is sought that top-p drops."""
INTEGERS = ["logits_stride", "vocab_size", "num_blocks", "num_tiles"]
POINTERS = ["logits", "rows", "scratch"]


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def scan_rows(
    logits,
    rows,
    scratch,
    logits_stride,
    vocab_size,
    num_blocks,
    num_tiles,
    TILE_BLOCKS: tl.constexpr,
):
    """Draw row `program_id(0)` from part `program_id(1)` of its tiles; tell the highest logit of blocks and tiles.

    Of rows with a top-p also each tile's mass, relative to its highest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    best_scores, best_tokens, highest_of_blocks, _, highest_of_tiles, mass_of_tiles = _of_row(
        scratch, row, splits, num_blocks, num_tiles
    )
    logits += row * logits_stride
    key, temperature, top_p, _, _ = _parameters(rows, row)
    is_greedy = temperature <= 0.0
    scale = tl.where(is_greedy, 1.0, temperature)
    needs_mass = (top_p < 1.0) & (temperature > 0.0)
    per_degree = (1.0 / scale).to(tl.float32)
    best = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), 0, tl.int64)
    tiles_of_split = (num_tiles + splits - 1) // splits
    first_tile = split * tiles_of_split
    for tile in range(first_tile, tl.minimum(first_tile + tiles_of_split, num_tiles)):
        block = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        tokens = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
        values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        highest = tl.max(values, 1)
        tl.store(highest_of_blocks + block, highest, mask=block < num_blocks)
        most = tl.max(highest, 0)
        tl.store(highest_of_tiles + tile, most)
        if needs_mass:
            level = tl.where(most == float("-inf"), 0.0, most)
            mass = tl.sum(tl.sum(tl.exp((values - level) * per_degree), 1), 0)
            tl.store(mass_of_tiles + tile, mass)
        best, best_token = _draw_from_blocks(
            best, best_token, logits, block, highest, key, scale, is_greedy, float("-inf"), 0, vocab_size, TILE_BLOCKS
        )
    tl.store(best_scores + split, best)
    tl.store(best_tokens + split, best_token)


@triton.jit(do_not_specialize=[*INTEGERS, "splits"], do_not_specialize_on_alignment=[*POINTERS, "drawn"])
def settle_rows(
    logits,
    rows,
    scratch,
    drawn,
    logits_stride,
    vocab_size,
    num_blocks,
    num_tiles,
    splits,
    TILE_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """The token of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    best_scores, best_tokens, highest_of_blocks, listed, highest_of_tiles, mass_of_tiles = _of_row(
        scratch, row, splits, num_blocks, num_tiles
    )
    logits += row * logits_stride
    key, temperature, top_p, min_p, top_k = _parameters(rows, row)
    split = tl.arange(0, MOST_SPLITS)
    scores = tl.load(best_scores + split, mask=split < splits, other=float("-inf"))
    tokens = tl.load(best_tokens + split, mask=split < splits, other=0)
    best = tl.max(scores, 0)
    # Of equal scores the lowest id; where nothing may be drawn, the first token, as on the CPU.
    token = tl.min(tl.where((scores == best) & (split < splits), tokens, vocab_size), 0)
    has_top_k = top_k < vocab_size
    has_top_p = top_p < 1.0
    if (temperature > 0.0) & (has_top_k | has_top_p | (min_p > 0.0)) & (best > float("-inf")):
        tile = tl.arange(0, ALL_TILES)
        highest = tl.load(highest_of_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        most = tl.max(highest, 0)
        total = tl.full((), 0.0, tl.float64)
        is_exact = has_top_k
        if has_top_k:
            least, count = _least_of_top_k(
                logits, highest_of_blocks, listed, most, top_k, vocab_size, num_blocks, TILE_BLOCKS, ALL_BLOCKS
            )
            if has_top_p:
                above, total = _before(logits, listed, count, least, 0, most, temperature, vocab_size, TILE_BLOCKS)
                total += (top_k - above).to(tl.float64) * _weight(least, most, temperature)
            # All equals of the last one take part: those that top-k leaves out are dropped below.
            token = _draw_before(logits, listed, count, key, temperature, least, vocab_size, vocab_size, TILE_BLOCKS)
        elif has_top_p:
            masses = tl.load(mass_of_tiles + tile, mask=tile < num_tiles, other=0.0)
            total = tl.sum(masses.to(tl.float64) * _weight(highest, most, temperature), 0)
            enough = total * (top_p + TOLERANCE)
            level = _dropped_level(
                highest_of_blocks, tl.load(logits + token), most, temperature, enough, num_blocks, ALL_BLOCKS
            )
            if level > float("-inf"):
                count = _list_blocks(highest_of_blocks, listed, level, num_blocks, ALL_BLOCKS)
                token = _draw_before(logits, listed, count, key, temperature, level, 0, vocab_size, TILE_BLOCKS)
        is_kept = token < 0
        while is_kept == 0:
            own = tl.load(logits + token)
            count = _list_blocks(highest_of_blocks, listed, own, num_blocks, ALL_BLOCKS)
            rank, before = _before(logits, listed, count, own, token, most, temperature, vocab_size, TILE_BLOCKS)
            if has_top_p & (is_exact == 0) & (tl.abs(before - top_p * total) <= total * TOLERANCE):
                total = _exact_mass(logits, most, temperature, vocab_size, num_tiles, TILE_BLOCKS)
                is_exact = token >= 0
            in_top_p = (top_p >= 1.0) | (before < top_p * total)
            is_likely = _weight(own, most, temperature) >= min_p
            is_kept = (rank == 0) | ((rank < top_k) & in_top_p & is_likely)
            if is_kept == 0:
                token = _draw_before(logits, listed, count, key, temperature, own, token, vocab_size, TILE_BLOCKS)
    tl.store(drawn + row, token)


@triton.jit
def _of_row(scratch, row, splits, num_blocks, num_tiles):
    """A row's best scores and tokens, one for each split; highest logits and listed numbers of its blocks; highest
    logits and masses of its tiles. `scratch` has `8 * (2 * splits + num_blocks + num_tiles)` bytes for each row.
    """
    wide = scratch + row * (2 * splits + num_blocks + num_tiles)
    blocks = (wide + 2 * splits).to(tl.pointer_type(tl.float32), bitcast=True)
    listed = (blocks + num_blocks).to(tl.pointer_type(tl.int32), bitcast=True)
    tiles = blocks + 2 * num_blocks
    return wide.to(tl.pointer_type(tl.float64), bitcast=True), wide + splits, blocks, listed, tiles, tiles + num_tiles


@triton.jit
def _parameters(rows, row):
    """A row's key, temperature, top-p, min-p and top-k."""
    fields = rows + row * ROW_FIELDS
    key = tl.load(fields).to(tl.uint64, bitcast=True)
    temperature = tl.load(fields + 1).to(tl.float64, bitcast=True)
    top_p = tl.load(fields + 2).to(tl.float64, bitcast=True)
    min_p = tl.load(fields + 3).to(tl.float64, bitcast=True)
    return key, temperature, top_p, min_p, tl.load(fields + 4)


@triton.jit
def _draw_from_blocks(
    best, best_token, logits, block, highest, key, scale, is_greedy, end, end_token, vocab_size, BLOCKS: tl.constexpr
):
    """The best score and its token, of those so far and of the tokens of `block` that stand before an end.

    That is a logit and an id: what stands before has a higher logit, or the same one and a lower id. `highest` is the
    highest logit of each block that takes part. The block with the highest bound is looked at first, until no bound
    reaches the best score. A greedy row's equals needn't be looked at, since of blocks with equal bounds the lowest is
    first.
    """
    bounds = highest.to(tl.float64) / scale
    if is_greedy == 0:
        bounds -= tl.log(_block_minimum(key, block)[0])
    bound, place = tl.max(bounds, 0, return_indices=True)
    while (bound > best) | ((bound == best) & (is_greedy == 0) & (bound > float("-inf"))):
        is_it = tl.arange(0, BLOCKS) == place
        number = tl.sum(tl.where(is_it, block, 0), 0)
        tokens = number.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        scores = values.to(tl.float64) / scale
        if is_greedy == 0:
            scores += _gumbel_noise(key, number, tokens)
        scores = tl.where(_is_before(values, tokens, end, end_token), scores, float("-inf"))
        score = tl.max(scores, 0)
        token = tl.min(tl.where(scores == score, tokens, vocab_size), 0)
        is_better = (score > best) | ((score == best) & (token < best_token) & (score > float("-inf")))
        best = tl.where(is_better, score, best)
        best_token = tl.where(is_better, token, best_token)
        bounds = tl.where(is_it, float("-inf"), bounds)
        bound, place = tl.max(bounds, 0, return_indices=True)
    return best, best_token


@triton.jit
def _draw_before(logits, listed, count, key, temperature, end, end_token, vocab_size, BLOCKS: tl.constexpr):
    """Draw from the listed blocks' tokens that stand before an end."""
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0, tl.int64)
    for first in range(0, count, BLOCKS):
        block, tokens, values = _listed_tokens(logits, listed, first, count, vocab_size, BLOCKS)
        highest = tl.max(tl.where(_is_before(values, tokens, end, end_token), values, float("-inf")), 1)
        best, token = _draw_from_blocks(
            best, token, logits, block, highest, key, temperature, False, end, end_token, vocab_size, BLOCKS
        )
    return token


@triton.jit
def _before(logits, listed, count, end, end_token, most, temperature, vocab_size, BLOCKS: tl.constexpr):
    """How many tokens of the listed blocks stand before an end, and their mass relative to logit `most`."""
    number = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, count, BLOCKS):
        _, tokens, values = _listed_tokens(logits, listed, first, count, vocab_size, BLOCKS)
        is_before = _is_before(values, tokens, end, end_token)
        number += tl.sum(tl.sum(is_before.to(tl.int32), 1), 0)
        mass += tl.sum(tl.sum(tl.where(is_before, _weight(values, most, temperature), 0.0), 1), 0)
    return number, mass


@triton.jit
def _exact_mass(logits, most, temperature, vocab_size, num_tiles, BLOCKS: tl.constexpr):
    """The mass of the whole vocabulary, all of it in float64."""
    mass = tl.full((), 0.0, tl.float64)
    for tile in range(0, num_tiles):
        tokens = tile * (BLOCKS * BLOCK_SIZE) + tl.arange(0, BLOCKS * BLOCK_SIZE)
        values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        mass += tl.sum(_weight(values, most, temperature), 0)
    return mass


@triton.jit
def _least_of_top_k(
    logits,
    highest_of_blocks,
    listed,
    most,
    top_k,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    """The logit of the last token that top-k keeps, and how many blocks are listed that have one as high.

    The `top_k`-th highest of the blocks' own highest logits bounds it from below. Both are found by halving the range
    of float32's keys: the first among the blocks, the second among the tokens of those that reach it.
    """
    block = tl.arange(0, ALL_BLOCKS)
    keys = _ordered_keys(tl.load(highest_of_blocks + block, mask=block < num_blocks, other=float("-inf")))
    low, high = tl.full((), LOWEST_KEY, tl.int64), _ordered_keys(most).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        is_enough = tl.sum((keys > middle.to(tl.int32)).to(tl.int32), 0) < top_k
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    count = _list_blocks(highest_of_blocks, listed, _value_of_key(low), num_blocks, ALL_BLOCKS)
    high = _ordered_keys(most).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        number = tl.full((), 0, tl.int64)
        for first in range(0, count, BLOCKS):
            values = _listed_tokens(logits, listed, first, count, vocab_size, BLOCKS)[2]
            number += tl.sum(tl.sum((_ordered_keys(values) > middle.to(tl.int32)).to(tl.int32), 1), 0)
        high = tl.where(number < top_k, middle, high)
        low = tl.where(number < top_k, low, middle + 1)
    return _value_of_key(low), count


@triton.jit
def _dropped_level(highest_of_blocks, own, most, temperature, enough, num_blocks, ALL_BLOCKS: tl.constexpr):
    """A logit of at least `own` that top-p drops with all below; minus infinity where none is known.

    The highest tokens of the blocks alone weigh more than `enough` and stand before it. So a draw from a long tail is
    neither ranked nor drawn again among all that stand before it.
    """
    block = tl.arange(0, ALL_BLOCKS)
    highest = tl.load(highest_of_blocks + block, mask=block < num_blocks, other=float("-inf"))
    weights = _weight(highest, most, temperature)
    low, high = own, most
    is_dropped = tl.sum(tl.where(highest > low, weights, 0.0), 0) > enough
    if is_dropped:
        for _ in range(LEVEL_HALVINGS):
            middle = (low + high) * 0.5
            is_enough = tl.sum(tl.where(highest > middle, weights, 0.0), 0) > enough
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
    return tl.where(is_dropped, low, float("-inf"))


@triton.jit
def _list_blocks(highest_of_blocks, listed, least, num_blocks, ALL_BLOCKS: tl.constexpr):
    """Write down the blocks with a logit of at least `least`, in the order of ids; returns how many these are."""
    block = tl.arange(0, ALL_BLOCKS)
    highest = tl.load(highest_of_blocks + block, mask=block < num_blocks, other=float("-inf"))
    is_listed = (highest >= least) & (block < num_blocks)
    place = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    # Other threads read the list: the one before is done with, the new one is there.
    tl.debug_barrier()
    tl.store(listed + place, block, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), 0)


@triton.jit
def _listed_tokens(logits, listed, first, count, vocab_size, BLOCKS: tl.constexpr):
    """So many of the listed blocks from `first` on, their tokens and these tokens' logits; minus infinity for none."""
    place = first + tl.arange(0, BLOCKS)
    block = tl.load(listed + place, mask=place < count, other=0)
    tokens = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    is_there = (place < count)[:, None] & (tokens < vocab_size)
    return block, tokens, tl.load(logits + tokens, mask=is_there, other=float("-inf"))


@triton.jit
def _is_before(values, tokens, end, end_token):
    """Whether tokens stand before an end in their row's order. Nothing that may not be drawn does."""
    return ((values > end) | ((values == end) & (tokens < end_token))) & (values > float("-inf"))


@triton.jit
def _weight(values, most, temperature):
    """Likelihood relative to a token with logit `most`."""
    return tl.exp((values.to(tl.float64) - most.to(tl.float64)) / temperature)


@triton.jit
def _ordered_keys(values):
    """int32 in the order of the floats; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of_key(key):
    """The float of an int64 key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel_noise(key, block, tokens):
    """Of one block's tokens, float64."""
    least, place = _block_minimum(key, block)
    own = _exponential(_hash(key, tokens))
    return -tl.log(tl.where(tokens % BLOCK_SIZE == place, least, least + own))


@triton.jit
def _block_minimum(key, block):
    """The smallest exponential of each block, and which of its tokens has it."""
    bits = _hash(key, block.to(tl.int64) + BLOCK_COUNTER)
    return _exponential(bits) / BLOCK_SIZE, (bits & (BLOCK_SIZE - 1)).to(tl.int64)


@triton.jit
def _exponential(bits):
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52)


@triton.jit
def _hash(key, counters):
    bits = key + (counters.to(tl.uint64) + 1) * INCREMENT
    bits = (bits ^ (bits >> 30)) * FIRST_MULTIPLIER
    bits = (bits ^ (bits >> 27)) * SECOND_MULTIPLIER
    return bits ^ (bits >> 31)
