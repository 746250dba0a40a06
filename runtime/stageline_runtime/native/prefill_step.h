/* The prefill part of one layer: rotate and store a chunk's keys and values, then attend block by block.
 *
 * A block of query rows (token-major, the heads of one group side by side) meets 64 keys at a time; maximum and sum of
 * the softmax run along (Milakov and Gimelshein 2018, arXiv 1805.02867), so that scratch memory does not grow with the
 * context. Where the CPU multiplies pairs of bfloat16 (PAIRED), products take pairs of neighbours along the summed axis.
 *
 * Included by kernels.c with ELEMENT, WIDEN, ROUND, NAME and PAIRED set for one element type.
 */
#ifndef QUERY_ROWS
#define QUERY_ROWS 192 /* rows of a block; the scratch memory below is for so many */
#define BLOCK_KEYS 64
#define TILE_ROWS 4
#define ROUND_UP(value, to) (((value) + (to) - 1) / (to) * (to))
#endif

#if PAIRED
#define PACKED uint32_t
#define PER_PACKED 2
#define MULTIPLY_ADD(sum, one, many)                                                                                   \
    (lanes)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(one)),                                    \
                            (__m512bh)_mm512_loadu_si512(many))
#else
#define PACKED float
#define PER_PACKED 1
#define MULTIPLY_ADD(sum, one, many) ((sum) + (one) * *(const lanes *)(many))
#endif

/* Scratch memory of one thread, in floats; 64 is the width of a tile. */
typedef struct {
    PACKED *queries; /* [QUERY_ROWS][depth] */
    PACKED *keys;    /* [depth][BLOCK_KEYS], a key a column */
    PACKED *values;  /* [BLOCK_KEYS / PER_PACKED][width] */
    PACKED *weights; /* [QUERY_ROWS][BLOCK_KEYS / PER_PACKED] */
    float *scores;   /* [QUERY_ROWS][BLOCK_KEYS] */
    float *sums;     /* [QUERY_ROWS][width] */
    float *most;     /* [QUERY_ROWS]: running maximum */
    float *total;    /* [QUERY_ROWS]: running sum of weights */
    int depth, width;
} NAME(prefill_scratch);

static NAME(prefill_scratch) NAME(divide)(float *memory, int head_dim) {
    NAME(prefill_scratch) s;
    s.depth = head_dim / PER_PACKED, s.width = ROUND_UP(head_dim, 64);
    s.scores = memory, memory += QUERY_ROWS * BLOCK_KEYS;
    s.sums = memory, memory += QUERY_ROWS * s.width;
    s.most = memory, memory += QUERY_ROWS;
    s.total = memory, memory += QUERY_ROWS;
    s.queries = (PACKED *)memory, memory += QUERY_ROWS * head_dim;
    s.keys = (PACKED *)memory, memory += BLOCK_KEYS * head_dim;
    s.values = (PACKED *)memory, memory += BLOCK_KEYS * s.width;
    s.weights = (PACKED *)memory;
    return s;
}

/* `results[TILE_ROWS][64]` += rows `left[TILE_ROWS][depth]` times `right[depth][64]` */
static inline void NAME(tile)(const PACKED *left, int left_stride, const PACKED *right, int right_stride, int depth,
                              float *results, int results_stride) {
    lanes sums[TILE_ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = *(const lanes *)(results + r * results_stride + c * 16);
    for (int k = 0; k < depth; k++) {
        const PACKED *row = right + k * right_stride;
#pragma GCC unroll 4
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
                sums[r][c] = MULTIPLY_ADD(sums[r][c], left[r * left_stride + k], row + c * 16);
    }
#pragma GCC unroll 4
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) *(lanes *)(results + r * results_stride + c * 16) = sums[r][c];
}

static inline void NAME(pack)(const ELEMENT *row, int size, PACKED *packed) {
#if PAIRED
    memcpy(packed, row, sizeof(ELEMENT) * (size_t)size);
#else
    for (int d = 0; d < size; d++) packed[d] = WIDEN(row[d]);
#endif
}

/* a block's queries, rotated; rows that only fill up a tile are zero */
static void NAME(pack_queries)(const attention_arguments *a, int64_t first_token, int64_t head, int num_tokens,
                               const NAME(prefill_scratch) * s) {
    int size = (int)a->head_dim, group = (int)a->group_size, num_rows = num_tokens * group;
    ELEMENT rotated[MOST_HEAD_SIZE];
    for (int r = 0; r < num_rows; r++) {
        int64_t token = first_token + r / group;
        const ELEMENT *query = (const ELEMENT *)a->query_key + token * a->query_key_stride + (head * group + r % group) * size;
        if (a->cosines) {
            NAME(rotate)(query, (const ELEMENT *)a->cosines + token * size, (const ELEMENT *)a->sines + token * size,
                         size, rotated);
            query = rotated;
        }
        NAME(pack)(query, size, s->queries + r * s->depth);
    }
    int spare = (int)ROUND_UP(num_rows, TILE_ROWS) - num_rows;
    memset(s->queries + num_rows * s->depth, 0, sizeof(PACKED) * (size_t)(spare * s->depth));
}

/* 64 keys from a position on as columns and values as rows; what lies past `count` is zero */
static void NAME(pack_block)(const ELEMENT *keys, const ELEMENT *values, const int32_t *blocks, int64_t position,
                             int count, int size, const NAME(prefill_scratch) * s) {
    if (count < BLOCK_KEYS) {
        memset(s->keys, 0, sizeof(PACKED) * (size_t)(s->depth * BLOCK_KEYS));
        memset(s->values, 0, sizeof(PACKED) * (size_t)(BLOCK_KEYS / PER_PACKED * s->width));
    }
    for (int t = 0; t < count; t++) {
        PACKED row[MOST_HEAD_SIZE];
        NAME(pack)(keys + place_of(blocks, position + t) * size, size, row);
        for (int k = 0; k < s->depth; k++) s->keys[k * BLOCK_KEYS + t] = row[k];
    }
#if PAIRED
    for (int t = 0; t < count; t += 2) {
        const ELEMENT *even = values + place_of(blocks, position + t) * size;
        if (t + 1 < count) {
            const ELEMENT *odd = values + place_of(blocks, position + t + 1) * size;
            for (int d = 0; d < size; d++) s->values[t / 2 * s->width + d] = even[d] | (uint32_t)odd[d] << 16;
        } else
            for (int d = 0; d < size; d++) s->values[t / 2 * s->width + d] = even[d];
    }
#else
    for (int t = 0; t < count; t++) {
        const ELEMENT *value = values + place_of(blocks, position + t) * size;
        for (int d = 0; d < size; d++) s->values[t * s->width + d] = WIDEN(value[d]);
    }
#endif
}

/* one row's scores of a block to weights; it sees keys `from` up to and without `to` */
static inline void NAME(weigh)(const NAME(prefill_scratch) * s, int row, int from, int to, float scale) {
    float *scores = s->scores + row * BLOCK_KEYS, *sums = s->sums + row * s->width;
    float most = s->most[row], sum = 0;
    ELEMENT *weights = (ELEMENT *)(s->weights + row * (BLOCK_KEYS / PER_PACKED));
    for (int t = from; t < to; t++) {
        scores[t] *= scale;
        most = scores[t] > most ? scores[t] : most;
    }
    for (int t = 0; t < BLOCK_KEYS; t++) {
        float below = scores[t] - most; /* above 0 only for a key that isn't seen */
        float weight = expf(below < 0 ? below : 0);
        weight = t >= from && t < to ? weight : 0;
        scores[t] = weight;
        sum += weight;
    }
#if PAIRED
    for (int t = 0; t < BLOCK_KEYS; t++) weights[t] = ROUND(scores[t]);
#else
    (void)weights;
    memcpy(s->weights + row * BLOCK_KEYS, scores, sizeof(float) * BLOCK_KEYS);
#endif
    float kept = expf(s->most[row] - most);
    if (kept != 1)
        for (int d = 0; d < s->width; d++) sums[d] *= kept;
    s->total[row] = s->total[row] * kept + sum;
    s->most[row] = most;
}

/* tokens `first..first + num_tokens` of a chunk, for one key/value head */
static void NAME(attend_block)(const attention_arguments *a, const tile *chunk, int64_t head, int64_t first,
                               int num_tokens, const NAME(prefill_scratch) * s) {
    int size = (int)a->head_dim, group = (int)a->group_size, num_rows = num_tokens * group;
    int tiled_rows = (int)ROUND_UP(num_rows, TILE_ROWS);
    const ELEMENT *keys = (const ELEMENT *)a->keys + head * a->head_stride;
    const ELEMENT *values = (const ELEMENT *)a->values + head * a->head_stride;
    const int32_t *blocks = a->block_table + chunk->slot * a->blocks_per_slot;
    int64_t position = chunk->position + first, end = position + num_tokens;
    int64_t start = a->window && position >= a->window ? position + 1 - a->window : 0;
    NAME(pack_queries)(a, chunk->token + first, head, num_tokens, s);
    memset(s->sums, 0, sizeof(float) * (size_t)(tiled_rows * s->width));
    for (int r = 0; r < tiled_rows; r++) s->most[r] = -3e38f, s->total[r] = 0;
    for (int64_t block = start; block < end; block += BLOCK_KEYS) {
        int count = (int)(end - block < BLOCK_KEYS ? end - block : BLOCK_KEYS);
        NAME(pack_block)(keys, values, blocks, block, count, size, s);
        memset(s->scores, 0, sizeof(float) * (size_t)(tiled_rows * BLOCK_KEYS));
        for (int r = 0; r < tiled_rows; r += TILE_ROWS)
            NAME(tile)(s->queries + r * s->depth, s->depth, s->keys, BLOCK_KEYS, s->depth, s->scores + r * BLOCK_KEYS,
                       BLOCK_KEYS);
        for (int r = 0; r < tiled_rows; r++) {
            int64_t own = position + (r < num_rows ? r : num_rows - 1) / group;
            int64_t from = a->window && own - a->window + 1 > block ? own - a->window + 1 - block : 0;
            int64_t to = own + 1 - block;
            NAME(weigh)(s, r, (int)from, (int)(to < 0 ? 0 : to < count ? to : count), a->scale);
        }
        for (int r = 0; r < tiled_rows; r += TILE_ROWS)
            for (int d = 0; d < s->width; d += 64)
                NAME(tile)(s->weights + r * (BLOCK_KEYS / PER_PACKED), BLOCK_KEYS / PER_PACKED, s->values + d, s->width,
                           BLOCK_KEYS / PER_PACKED, s->sums + r * s->width + d, s->width);
    }
    for (int r = 0; r < num_rows; r++) {
        int64_t token = chunk->token + first + r / group;
        ELEMENT *output = (ELEMENT *)a->output + ((token * a->num_kv_heads + head) * group + r % group) * size;
        float share = 1 / s->total[r];
        for (int d = 0; d < size; d++) output[d] = ROUND(s->sums[r * s->width + d] * share);
    }
}

void NAME(prefill_step)(const attention_arguments *a) {
    int64_t size = a->head_dim, block_tokens = QUERY_ROWS / a->group_size;
    for (int64_t index = 0; index < a->num_tiles; index++) {
        const tile *chunk = a->tiles + index;
        const int32_t *table = a->block_table + chunk->slot * a->blocks_per_slot;
        int64_t blocks = (chunk->count + block_tokens - 1) / block_tokens;
#pragma omp parallel for num_threads((int)a->num_threads) if (a->num_threads > 1) schedule(static)
        for (int64_t head = 0; head < a->num_kv_heads; head++)
            for (int64_t t = 0; t < chunk->count; t++)
                NAME(store)(a, chunk->token + t, head, place_of(table, chunk->position + t));
#pragma omp parallel for num_threads((int)a->num_threads) if (a->num_threads > 1) schedule(static)
        for (int64_t work = 0; work < blocks * a->num_kv_heads; work++) {
            NAME(prefill_scratch) s = NAME(divide)(a->scratch + thread_index() * a->scratch_floats, (int)size);
            int64_t first = work / a->num_kv_heads * block_tokens;
            int64_t left = chunk->count - first;
            NAME(attend_block)(a, chunk, work % a->num_kv_heads, first, (int)(left < block_tokens ? left : block_tokens),
                               &s);
        }
    }
}

#undef PACKED
#undef PER_PACKED
#undef MULTIPLY_ADD
