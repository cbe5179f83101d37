/* The positions that a token attends to: those with the greatest scores, of equal ones the lowest. */
#include "latent.h"

enum {
    MAX_KEY = 256, /* elements of an index key */
    MAX_INDEX_HEADS = 128,
    CHUNK = 512, /* positions of a task of scores */
    TOKENS = 64, /* tokens whose scores are kept at once */
};

INLINE void score_chunk(const latent_job *j, long token, long from, long end, float *scores, const int dtype)
{
    const long dim = j->dim, heads = j->heads;
    float q[(MAX_INDEX_HEADS + 3) * MAX_KEY], keys[SPAN * MAX_KEY], products[4][SPAN];
    for (long d = 0; d < heads * dim; d += 8)
        store8(q, d, load8(j->q, token * heads * dim + d, dtype), F32);
    memset(q + heads * dim, 0, (size_t)(3 * dim) * sizeof *q);
    for (long base = from; base < end; base += SPAN) {
        long count = min(SPAN, end - base);
        read_keys(j, token, NULL, base, count, keys);
        for (long p = 0; p < count; p++) scores[base + p] = 0;
        for (long h = 0; h < heads; h += 4) {
            multiply(q + h * dim, keys, dim, count, products);
            for (long i = 0; i < min(4, heads - h); i++) {
                const float weight = j->weights[token * heads + h + i];
                for (long p = 0; p < count; p++) {
                    float x = products[i][p];
                    scores[base + p] += weight * (x < 0 ? 0 : x); /* NaN stays */
                }
            }
        }
    }
}

static void score_task(const void *job, long index)
{
    const latent_job *j = job;
    const long chunks = (j->longest + CHUNK - 1) / CHUNK, token = j->first + index / chunks;
    const long from = index % chunks * CHUNK, seen = seen_by(j, token);
    float *scores = j->scores + index / chunks * j->longest;
    if (seen <= j->top_k || from >= seen) return;
    if (j->dtype == BF16) score_chunk(j, token, from, min(from + CHUNK, seen), scores, BF16);
    else score_chunk(j, token, from, min(from + CHUNK, seen), scores, F32);
}

/* A number that grows with x; -0 counts as 0, NaN as more than anything. */
INLINE uint32_t rank_of(float x)
{
    uint32_t bits;
    if (x != x) return UINT32_MAX;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The count-th greatest rank of n scores, byte by byte; *ties: how many of that rank are taken. */
static uint32_t least_taken(const float *scores, long n, long count, long *ties)
{
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        long among[256] = {0};
        const uint32_t mask = shift == 24 ? 0 : UINT32_MAX << (shift + 8);
        int byte = 255;
        for (long p = 0; p < n; p++) {
            uint32_t rank = rank_of(scores[p]);
            if ((rank & mask) == prefix) among[rank >> shift & 255]++;
        }
        for (; among[byte] < count; byte--) count -= among[byte];
        prefix |= (uint32_t)byte << shift;
    }
    *ties = count;
    return prefix;
}

static void choose_task(const void *job, long index)
{
    const latent_job *j = job;
    const long token = j->first + index, seen = seen_by(j, token);
    int32_t *out = (int32_t *)j->out + token * j->top_k;
    const float *scores = j->scores + index * j->longest;
    long count = 0, ties = 0;
    if (seen <= j->top_k) {
        for (; count < seen; count++) out[count] = (int32_t)count;
        return;
    }
    const uint32_t least = least_taken(scores, seen, j->top_k, &ties);
    for (long p = 0; p < seen; p++) {
        uint32_t rank = rank_of(scores[p]);
        if (rank > least || (rank == least && ties-- > 0)) out[count++] = (int32_t)p;
    }
}

/* q [tokens, heads, dim], weights [tokens, heads] -> out [tokens, top_k]; 0 without memory. */
int surestep_latent_choose(int32_t *out, const void *q, const float *weights, const void *pages,
                           const int32_t *block_tables, const int64_t *slots, const int32_t *cu_rows,
                           const int32_t *start, long rows, long table_width, long heads, long dim,
                           long block_size, long top_k, int dtype, int page_dtype)
{
    assert(dim % 8 == 0 && dim <= MAX_KEY && heads <= MAX_INDEX_HEADS);
    latent_job j = {.out = out, .q = q, .pages = pages, .weights = weights, .block_tables = block_tables,
                    .slots = slots, .cu_rows = cu_rows, .start = start, .table_width = table_width,
                    .heads = heads, .dim = dim, .block_size = block_size, .top_k = top_k, .dtype = dtype,
                    .page_dtype = page_dtype};
    int32_t *row_of = rows_of_tokens(&j, rows);
    j.row_of = row_of;
    if (j.longest > top_k) j.scores = malloc((size_t)(TOKENS * j.longest) * sizeof *j.scores);
    const int served = j.longest <= top_k || j.scores;
    for (; served && j.first < cu_rows[rows]; j.first += TOKENS) {
        const long tokens = min(TOKENS, cu_rows[rows] - j.first);
        if (j.scores) parallel_for(score_task, &j, tokens * ((j.longest + CHUNK - 1) / CHUNK));
        parallel_for(choose_task, &j, tokens);
    }
    free(j.scores);
    free(row_of);
    return served;
}
