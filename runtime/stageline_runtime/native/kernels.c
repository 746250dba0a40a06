/* What a decoder layer does between its matrix products, for float32 and bfloat16, and what ranks exchange.
 *
 * The headers are the code, included once for each element type. Sums are kept in float32; what is stored, and what
 * plain operators would round in between, is rounded as they round it, so that all paths fill the cache alike.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MOST_HEAD_SIZE 256
#define MOST_GROUP_SIZE 16

typedef float lanes __attribute__((vector_size(64), aligned(4))); /* 16 floats */

typedef struct {
    int32_t token, count, slot, position; /* consecutive tokens of one request; slot -1: padding, whose output is zero */
} tile;

typedef struct {
    const void *query_key, *value, *cosines, *sines; /* cosines NULL: rotated already */
    void *keys, *values, *output;
    float *scratch; /* scratch_floats for each thread */
    const tile *tiles;
    const int32_t *block_table; /* a row of blocks_per_slot blocks for each slot */
    int64_t query_key_stride, value_stride, head_stride, blocks_per_slot;
    int64_t num_tiles, num_kv_heads, group_size, head_dim;
    int64_t window, num_threads, scratch_floats; /* window 0: none */
    float scale;
} attention_arguments;

/* where a position of a slot with these blocks lies among the keys of a head, counted in keys */
static inline int64_t place_of(const int32_t *blocks, int64_t position) {
    return (int64_t)blocks[position / BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

/* how many keys from `position` on, up to `end`, lie one behind the other: those of neighbouring blocks */
static inline int64_t run_length(const int32_t *blocks, int64_t position, int64_t end) {
    int64_t block = position / BLOCK_TOKENS, stop = (block + 1) * BLOCK_TOKENS;
    while (stop < end && blocks[block + 1] == blocks[block] + 1) block++, stop += BLOCK_TOKENS;
    return (stop < end ? stop : end) - position;
}

static inline int64_t thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline float bfloat16_widen(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static inline uint16_t bfloat16_round(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define ELEMENT uint16_t
#define WIDEN bfloat16_widen
#define ROUND bfloat16_round
#define NAME(name) name##_bfloat16
#ifdef __AVX512BF16__
#define PAIRED 1
#else
#define PAIRED 0
#endif
#include "decode_step.h"
#include "prefill_step.h"
#include "row_operators.h"
#undef ELEMENT
#undef WIDEN
#undef ROUND
#undef NAME
#undef PAIRED

#define ELEMENT float
#define WIDEN(value) (value)
#define ROUND(value) (value)
#define NAME(name) name##_float32
#define PAIRED 0
#include "decode_step.h"
#include "prefill_step.h"
#include "row_operators.h"

#include "rank_exchange.h"
