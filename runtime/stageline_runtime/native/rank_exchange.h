/* What the ranks of one stage exchange: an area of memory that all of them map, and one barrier an exchange.
 *
 * Each rank has a place in the area: a count of the rounds that it has published, a description of each of its two
 * newest rounds, and two buffers that rounds use in turn. A rank writes its data and raises its count; it reads the others'
 * once their counts have reached its own. A buffer is written again two rounds later, which its rank begins only when it
 * has seen that all others published the round between, that is, had read this one. So one wait a round is enough.
 *
 * Sums are made by every rank for itself, rank by rank in order and in float32, so all ranks get the same bits.
 * A rank that waits spins for some microseconds, lets others have its core, and then sleeps on the other's count (futex).
 */
#ifdef __linux__
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RANK_NAME_BYTES 96
#define RANK_SPINS 4096
#define RANK_YIELDS 64
#define RANK_BLOCK 512 /* floats that a sum keeps at once */

enum { RANKS_DONE = 0, RANKS_WAITING = 1, RANKS_ENDED = 2, RANKS_DIFFER = 3 };
enum { RANKS_REDUCE = 0, RANKS_GATHER = 1, RANKS_SCATTER = 2 };
enum { RANKS_FLOAT32 = 0, RANKS_BFLOAT16 = 1, RANKS_FLOAT16 = 2, RANKS_BYTES = 3 };

typedef struct {
    int64_t kind, type, count; /* count: elements of the whole exchange */
    char name[RANK_NAME_BYTES];
} rank_round;

typedef struct __attribute__((aligned(128))) {
    uint32_t published; /* rounds; a futex */
    uint32_t sleepers;  /* ranks that sleep, or are about to, until it rises */
    rank_round rounds[2];
} rank_place;

typedef struct __attribute__((aligned(128))) {
    uint32_t magic, size, ended, unused;
    int64_t buffer_bytes; /* a multiple of 128 */
} rank_area;

typedef struct { /* an exchange under way, in its rank's own memory */
    rank_round round;
    int64_t done; /* elements of this rank's result that are there */
    uint32_t rounds, is_published;
    int64_t differs; /* the rank whose round is another, with RANKS_DIFFER */
} rank_progress;

static inline rank_place *rank_place_of(void *area, int64_t rank) {
    return (rank_place *)((char *)area + sizeof(rank_area)) + rank;
}

static inline char *rank_buffer(void *area, int64_t rank, uint32_t round) {
    rank_area *head = area;
    char *buffers = (char *)area + sizeof(rank_area) + head->size * sizeof(rank_place);
    return buffers + (rank * 2 + (round & 1)) * head->buffer_bytes;
}

/* Areas are made, and ended, by ranks/rank_area.py, which knows this layout. */
int64_t rank_area_bytes(int64_t size, int64_t buffer_bytes) {
    return (int64_t)sizeof(rank_area) + size * ((int64_t)sizeof(rank_place) + 2 * buffer_bytes);
}

static void rank_wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static inline float float16_widen(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}

static inline uint16_t float16_round(float wide) {
    _Float16 value = (_Float16)wide;
    uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* sum over ranks of `count` elements, `offset` elements into each rank's buffer of the round */
static void rank_sum(void *area, uint32_t round, int64_t type, int64_t offset, int64_t count, void *output) {
    rank_area *head = area;
    float sums[RANK_BLOCK];
    for (int64_t start = 0; start < count; start += RANK_BLOCK) {
        int64_t block = count - start < RANK_BLOCK ? count - start : RANK_BLOCK;
        for (int64_t rank = 0; rank < head->size; rank++) {
            const char *buffer = rank_buffer(area, rank, round);
            const float *wide = (const float *)buffer + offset + start;
            const uint16_t *narrow = (const uint16_t *)buffer + offset + start;
            if (rank == 0)
                for (int64_t i = 0; i < block; i++)
                    sums[i] = type == RANKS_FLOAT32    ? wide[i]
                              : type == RANKS_BFLOAT16 ? bfloat16_widen(narrow[i])
                                                       : float16_widen(narrow[i]);
            else
                for (int64_t i = 0; i < block; i++)
                    sums[i] += type == RANKS_FLOAT32    ? wide[i]
                               : type == RANKS_BFLOAT16 ? bfloat16_widen(narrow[i])
                                                        : float16_widen(narrow[i]);
        }
        if (type == RANKS_FLOAT32)
            memcpy((float *)output + start, sums, block * sizeof(float));
        else
            for (int64_t i = 0; i < block; i++)
                ((uint16_t *)output)[start + i] =
                    type == RANKS_BFLOAT16 ? bfloat16_round(sums[i]) : float16_round(sums[i]);
    }
}

static int rank_await(rank_area *head, uint32_t *word, uint32_t *sleepers, uint32_t round, int64_t nanoseconds) {
    for (int64_t i = 0; i < RANK_SPINS; i++) {
        if ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - round) >= 0) return RANKS_DONE;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    for (int64_t i = 0; i < RANK_YIELDS; i++) {
        if ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - round) >= 0) return RANKS_DONE;
        sched_yield();
    }
    struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    if ((int32_t)(seen - round) < 0 && !__atomic_load_n(&head->ended, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
    __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    if ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - round) >= 0) return RANKS_DONE;
    return __atomic_load_n(&head->ended, __ATOMIC_SEQ_CST) ? RANKS_ENDED : RANKS_WAITING;
}

/* Begin or go on with an exchange; RANKS_WAITING after about `nanoseconds` of waiting, and the same call goes on.
 * `count`: of reduce, elements of the input; of gather, elements of the input, of which the output has as many from each
 * rank; of scatter, elements of the output, of which the input has as many for each rank. */
int64_t rank_exchange(void *area, int64_t rank, rank_progress *progress, const void *input, void *output,
                      int64_t element_bytes, int64_t nanoseconds) {
    rank_area *head = area;
    rank_place *own = rank_place_of(area, rank);
    int64_t kind = progress->round.kind, type = progress->round.type, count = progress->round.count;
    int64_t parts = kind == RANKS_SCATTER ? head->size : 1;
    int64_t most = head->buffer_bytes / (parts * element_bytes);
    do { /* once for no elements too: an exchange of nothing keeps the ranks in step */
        int64_t piece = count - progress->done < most ? count - progress->done : most;
        if (!progress->is_published) {
            progress->rounds++;
            char *buffer = rank_buffer(area, rank, progress->rounds);
            for (int64_t part = 0; part < parts; part++)
                memcpy(buffer + part * piece * element_bytes,
                       (const char *)input + (part * count + progress->done) * element_bytes, piece * element_bytes);
            own->rounds[progress->rounds & 1] = progress->round;
            __atomic_store_n(&own->published, progress->rounds, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&own->sleepers, __ATOMIC_SEQ_CST)) rank_wake(&own->published);
            progress->is_published = 1;
        }
        for (int64_t other = 0; other < head->size; other++) {
            rank_place *place = rank_place_of(area, other);
            if (other == rank) continue;
            int status = rank_await(head, &place->published, &place->sleepers, progress->rounds, nanoseconds);
            if (status != RANKS_DONE) return status;
            if (memcmp(&place->rounds[progress->rounds & 1], &progress->round, sizeof(rank_round))) {
                progress->differs = other;
                return RANKS_DIFFER;
            }
        }
        char *result = (char *)output + progress->done * element_bytes;
        if (kind == RANKS_GATHER)
            for (int64_t other = 0; other < head->size; other++)
                memcpy(result + other * count * element_bytes, rank_buffer(area, other, progress->rounds),
                       piece * element_bytes);
        else
            rank_sum(area, progress->rounds, type, kind == RANKS_SCATTER ? rank * piece : 0, piece, result);
        progress->done += piece;
        progress->is_published = 0;
    } while (progress->done < count);
    return RANKS_DONE;
}

void rank_description(void *area, int64_t rank, uint32_t round, rank_round *description) {
    *description = rank_place_of(area, rank)->rounds[round & 1];
}
#endif
