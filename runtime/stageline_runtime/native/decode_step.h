/* One decode step of one layer: rotate queries and keys, store keys and values, attend over the slot's blocks, of which
 * neighbours are read as one.
 *
 * Included by kernels.c with ELEMENT, WIDEN, ROUND and NAME set for one element type. */

/* half-split rotation; each product is rounded before the sum, as separate operators would */
static inline void NAME(rotate)(const ELEMENT *head, const ELEMENT *cosines, const ELEMENT *sines, int size,
                                ELEMENT *rotated) {
    int half = size / 2;
    for (int i = 0; i < half; i++) {
        float low = WIDEN(head[i]), high = WIDEN(head[i + half]);
        ELEMENT low_turned = ROUND(-high * WIDEN(sines[i])), high_turned = ROUND(low * WIDEN(sines[i + half]));
        ELEMENT low_kept = ROUND(low * WIDEN(cosines[i])), high_kept = ROUND(high * WIDEN(cosines[i + half]));
        rotated[i] = ROUND(WIDEN(low_kept) + WIDEN(low_turned));
        rotated[i + half] = ROUND(WIDEN(high_kept) + WIDEN(high_turned));
    }
}

/* one token's key, rotated unless it is already, and value into the cache of one head */
static inline void NAME(store)(const attention_arguments *a, int64_t token, int64_t head, int64_t place) {
    ELEMENT *keys = (ELEMENT *)a->keys + head * a->head_stride, *values = (ELEMENT *)a->values + head * a->head_stride;
    int64_t size = a->head_dim, key_head = a->num_kv_heads * a->group_size + head;
    const ELEMENT *key = (const ELEMENT *)a->query_key + token * a->query_key_stride + key_head * size;
    const ELEMENT *value = (const ELEMENT *)a->value + token * a->value_stride + head * size;
    if (a->cosines)
        NAME(rotate)(key, (const ELEMENT *)a->cosines + token * size, (const ELEMENT *)a->sines + token * size,
                     (int)size, keys + place * size);
    else
        memcpy(keys + place * size, key, sizeof(ELEMENT) * (size_t)size);
    memcpy(values + place * size, value, sizeof(ELEMENT) * (size_t)size);
}

/* ask for a row of the next run while the last block of this one is read: the processor can't know where it lies */
static inline void NAME(fetch)(const ELEMENT *row, int size, int is_near) {
    if (is_near)
        for (int d = 0; d < size; d += 64 / (int)sizeof(ELEMENT)) __builtin_prefetch(row + d);
}

/* `group` query heads over the keys and values of one head at positions `first` up to `end`; `scores` holds a float for
 * each and head */
static inline __attribute__((always_inline)) void NAME(attend)(const ELEMENT *query, const ELEMENT *keys,
                                                               const ELEMENT *values, const int32_t *blocks,
                                                               ELEMENT *output, float *scores, int group, int64_t first,
                                                               int64_t end, int size, float scale) {
    float wide[MOST_GROUP_SIZE * MOST_HEAD_SIZE], row[MOST_HEAD_SIZE];
    int64_t count = end - first;
    for (int i = 0; i < group * size; i++) wide[i] = WIDEN(query[i]) * scale;
    for (int64_t t = 0, run; t < count; t += run) {
        const ELEMENT *key = keys + place_of(blocks, first + t) * size;
        run = run_length(blocks, first + t, end);
        const ELEMENT *next = t + run < count ? keys + (place_of(blocks, first + t + run) + BLOCK_TOKENS - run) * size : key;
        for (int64_t r = 0; r < run; r++) {
            NAME(fetch)(next + r * size, size, r >= run - BLOCK_TOKENS);
            for (int d = 0; d < size; d++) row[d] = WIDEN(key[r * size + d]);
            for (int g = 0; g < group; g++) {
                float sum = 0;
                for (int d = 0; d < size; d++) sum += row[d] * wide[g * size + d];
                scores[g * count + t + r] = sum;
            }
        }
    }
    for (int g = 0; g < group; g++) {
        float *score = scores + g * count, most = score[0], sum = 0;
        for (int64_t t = 1; t < count; t++) most = score[t] > most ? score[t] : most;
        for (int64_t t = 0; t < count; t++) sum += score[t] = expf(score[t] - most);
        for (int64_t t = 0; t < count; t++) score[t] /= sum;
    }
    memset(wide, 0, sizeof(float) * (size_t)(group * size));
    for (int64_t t = 0, run; t < count; t += run) {
        const ELEMENT *value = values + place_of(blocks, first + t) * size;
        run = run_length(blocks, first + t, end);
        const ELEMENT *next =
            t + run < count ? values + (place_of(blocks, first + t + run) + BLOCK_TOKENS - run) * size : value;
        for (int64_t r = 0; r < run; r++) {
            NAME(fetch)(next + r * size, size, r >= run - BLOCK_TOKENS);
            for (int d = 0; d < size; d++) row[d] = WIDEN(value[r * size + d]);
            for (int g = 0; g < group; g++) {
                float weight = scores[g * count + t + r];
                for (int d = 0; d < size; d++) wide[g * size + d] += weight * row[d];
            }
        }
    }
    for (int i = 0; i < group * size; i++) output[i] = ROUND(wide[i]);
}

static void NAME(one_head)(const attention_arguments *a, int64_t index) {
    int64_t head = index % a->num_kv_heads, size = a->head_dim, group = a->group_size;
    const tile *row = a->tiles + index / a->num_kv_heads;
    if (row->slot < 0) { /* padding */
        memset((ELEMENT *)a->output + (row->token * a->num_kv_heads + head) * group * size, 0,
               sizeof(ELEMENT) * (size_t)(group * size));
        return;
    }
    const int32_t *blocks = a->block_table + row->slot * a->blocks_per_slot;
    const ELEMENT *query_key = (const ELEMENT *)a->query_key + row->token * a->query_key_stride;
    const ELEMENT *query = query_key + head * group * size;
    const ELEMENT *keys = (const ELEMENT *)a->keys + head * a->head_stride;
    const ELEMENT *values = (const ELEMENT *)a->values + head * a->head_stride;
    ELEMENT rotated[MOST_GROUP_SIZE * MOST_HEAD_SIZE];
    NAME(store)(a, row->token, head, place_of(blocks, row->position));
    if (a->cosines) {
        const ELEMENT *cosines = (const ELEMENT *)a->cosines + row->token * size;
        const ELEMENT *sines = (const ELEMENT *)a->sines + row->token * size;
        for (int64_t g = 0; g < group; g++)
            NAME(rotate)(query + g * size, cosines, sines, (int)size, rotated + g * size);
        query = rotated;
    }
    int64_t first = a->window && row->position >= a->window ? row->position + 1 - a->window : 0;
    int64_t end = row->position + 1;
    ELEMENT *output = (ELEMENT *)a->output + (row->token * a->num_kv_heads + head) * group * size;
    float *scores = a->scratch + thread_index() * a->scratch_floats;
    int heads = (int)group;
    switch (size) { /* constant sizes let the compiler unroll */
    case 64: NAME(attend)(query, keys, values, blocks, output, scores, heads, first, end, 64, a->scale); break;
    case 128: NAME(attend)(query, keys, values, blocks, output, scores, heads, first, end, 128, a->scale); break;
    default: NAME(attend)(query, keys, values, blocks, output, scores, heads, first, end, (int)size, a->scale);
    }
}

void NAME(decode_step)(const attention_arguments *a) {
    int64_t total = a->num_tiles * a->num_kv_heads;
#pragma omp parallel for num_threads((int)a->num_threads) if (a->num_threads > 1) schedule(static)
    for (int64_t index = 0; index < total; index++) NAME(one_head)(a, index);
}
