/* One decode step of one layer: rotate queries and keys, store keys and values, attend over the slot's cache.
 *
 * `decode_step.h` is the code, included once for each element type. Sums are kept in float32; what is stored, and what
 * a rotation rounds in between, is rounded as the plain operators round it, so that both paths fill the cache alike.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define MOST_HEAD_SIZE 256
#define MOST_GROUP_SIZE 16

typedef struct {
    int64_t token, slot, position; /* slot -1: padding, whose output is zero */
} decode_row;

typedef struct {
    const void *query_key, *value, *cosines, *sines; /* cosines NULL: already rotated and stored */
    void *keys, *values, *output;
    float *scores; /* group_size * slot_tokens for each thread */
    const decode_row *rows;
    int64_t query_key_stride, value_stride, slot_tokens, num_rows, num_kv_heads, group_size, head_dim;
    int64_t window, num_threads; /* window 0: none */
    float scale;
} decode_arguments;

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
#include "decode_step.h"
#undef ELEMENT
#undef WIDEN
#undef ROUND
#undef NAME

#define ELEMENT float
#define WIDEN(value) (value)
#define ROUND(value) (value)
#define NAME(name) name##_float32
#include "decode_step.h"
