/* Attention of many heads to one latent a position, and the choice of the positions: see
 * surestep_kernels/mixers/latent_attention.py.
 *
 * A token goes through the positions that it sees in order, SPAN at a time, alone in its arithmetic:
 * what its heads share are the loads. Its result is therefore bit for bit the same as a decode row,
 * in a window of drafts and in a prefill chunk; and the same whether it sees all positions or has
 * chosen all of them. Pages may be FP8 (E4M3), whatever the queries are.
 */
#include <assert.h>
#include <stdlib.h>

#include "pool.h"
#include "vec.h"

enum { FP8 = 2 }; /* of pages, beside F32 and BF16 */
enum {
    SPAN = 32,        /* positions that are widened at once, and a step of the online softmax */
    TILE_HEADS = 8,   /* heads of a task of attention */
    MAX_LATENT = 1024,
    MAX_KEY = 256,    /* elements of an index key */
    MAX_INDEX_HEADS = 128,
    CHUNK = 512,      /* positions of a task of scores */
    TOKENS = 64,      /* tokens whose scores are kept at once */
};

typedef struct {
    void *out;
    const void *q, *pages;
    const float *weights; /* of index heads */
    const int32_t *block_tables;
    const int64_t *slots;
    const int32_t *cu_rows, *start, *chosen; /* chosen: [tokens, top_k] or NULL */
    const int32_t *row_of;                   /* of each token */
    float *scores;                           /* [TOKENS, longest] */
    long table_width, heads, dim, width, block_size, top_k, longest, first;
    float scale;
    int dtype, page_dtype;
} latent_job;

INLINE long min(long a, long b) { return a < b ? a : b; }

/* Positions up to a token's own. */
INLINE long seen_by(const latent_job *j, long token)
{
    long row = j->row_of[token];
    return j->start[row] + token - j->cu_rows[row] + 1;
}

/* 8 numbers in E4M3 from the index-th on. Where fp32 has sign, exponent and mantissa, their bits are
 * 2^-120 of the value, subnormals too. */
INLINE f8 load_fp8(const void *base, long index)
{
    typedef uint8_t b8 __attribute__((vector_size(8)));
    b8 codes;
    memcpy(&codes, (const char *)base + index, sizeof codes);
    u8x bits = __builtin_convertvector(codes, u8x), magnitude = bits & 0x7f;
    f8 value = (f8)((bits & 0x80) << 24 | magnitude << 20) * 0x1p120f;
    return select8((i8x)(magnitude == 0x7f), splat8(NAN), value);
}

/* Widen what pages hold of n positions of a token: those chosen from `base` on, or base, base + 1, .. */
INLINE void widen_keys(const latent_job *j, long token, const int32_t *chosen, long base, long n,
                       float *keys, const int dtype)
{
    const int32_t *table = j->block_tables + j->slots[j->row_of[token]] * j->table_width;
    for (long i = 0; i < n; i++) {
        long at = chosen ? chosen[base + i] : base + i;
        long line = ((long)table[at / j->block_size] * j->block_size + at % j->block_size) * j->dim;
        for (long d = 0; d < j->dim; d += 8) {
            f8 key = dtype == FP8 ? load_fp8(j->pages, line + d) : load8(j->pages, line + d, dtype);
            store8(keys, i * j->dim + d, key, F32);
        }
    }
}

static void read_keys(const latent_job *j, long token, const int32_t *chosen, long base, long n,
                      float *keys)
{
    if (j->page_dtype == FP8) widen_keys(j, token, chosen, base, n, keys, FP8);
    else if (j->page_dtype == BF16) widen_keys(j, token, chosen, base, n, keys, BF16);
    else widen_keys(j, token, chosen, base, n, keys, F32);
}

/* products[h][p] of four heads q, dim floats apart, with n keys. */
INLINE void multiply(const float *q, const float *keys, long dim, long n, float products[][SPAN])
{
    for (long p = 0; p < n; p += 2) {
        const float *one = keys + p * dim, *two = keys + min(p + 1, n - 1) * dim;
        f8 acc[4][2];
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) acc[h][0] = acc[h][1] = splat8(0);
        for (long d = 0; d < dim; d += 8) {
            f8 a = load8(one, d, F32), b = load8(two, d, F32);
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                f8 x = load8(q, h * dim + d, F32);
                acc[h][0] = fma8(x, a, acc[h][0]);
                acc[h][1] = fma8(x, b, acc[h][1]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            products[h][p] = sum_lanes(acc[h][0]);
            products[h][p + 1] = sum_lanes(acc[h][1]);
        }
    }
}

/* ---- attention ---- */

typedef struct {
    float max[TILE_HEADS], correction[TILE_HEADS];
    f8 sum[TILE_HEADS];
    float scores[TILE_HEADS][SPAN];
    float q[TILE_HEADS * MAX_LATENT], acc[TILE_HEADS * MAX_LATENT], keys[SPAN * MAX_LATENT];
} head_tile;

/* scores -> weights e^(score - max); updates the running max and sum of head h. */
static void soften(head_tile *t, int h, long n)
{
    float *scores = t->scores[h];
    for (long p = n; p % 8; p++) scores[p] = -INFINITY;
    f8 peak = load8(scores, 0, F32);
    for (long p = 8; p < n; p += 8) peak = max8(load8(scores, p, F32), peak);
    float top = max_lanes(peak), before = t->max[h];
    top = top > before ? top : before;
    f8 correction = exp8(splat8(before - top));
    t->max[h] = top;
    t->correction[h] = correction[0];
    t->sum[h] *= correction;
    for (long p = 0; p < n; p += 8) {
        f8 weight = exp8(load8(scores, p, F32) - top);
        t->sum[h] += weight;
        store8(scores, p, weight, F32);
    }
}

/* acc = acc * correction + weights V for four heads from `first`, `vectors` * 8 elements from d. */
INLINE void add_values(head_tile *t, int first, long d, const int vectors, const latent_job *j, long n)
{
    float *sums = t->acc + first * j->width + d;
    f8 acc[4][2];
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            acc[h][v] = load8(sums, h * j->width + v * 8, F32) * t->correction[first + h];
    for (long p = 0; p < n; p++) {
        f8 value[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) value[v] = load8(t->keys, p * j->dim + d + v * 8, F32);
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            f8 weight = splat8(t->scores[first + h][p]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) acc[h][v] = fma8(value[v], weight, acc[h][v]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) store8(sums, h * j->width + v * 8, acc[h][v], F32);
}

INLINE void add_all_values(head_tile *t, int first, const latent_job *j, long n)
{
    long d = 0;
    for (; d + 16 <= j->width; d += 16) add_values(t, first, d, 2, j, n);
    for (; d < j->width; d += 8) add_values(t, first, d, 1, j, n);
}

INLINE void attend_tile(const latent_job *j, long token, long head, head_tile *t, const int dtype)
{
    const long dim = j->dim, heads = min(TILE_HEADS, j->heads - head), seen = seen_by(j, token);
    const long n = j->chosen ? min(seen, j->top_k) : seen;
    for (int h = 0; h < TILE_HEADS; h++) {
        t->max[h] = -INFINITY;
        t->sum[h] = splat8(0);
        for (long d = 0; d < dim; d += 8) {
            f8 q = h < heads ? load8(j->q, (token * j->heads + head + h) * dim + d, dtype) : splat8(0);
            store8(t->q, h * dim + d, q * j->scale, F32);
        }
        for (long d = 0; d < j->width; d += 8) store8(t->acc, h * j->width + d, splat8(0), F32);
    }
    for (long base = 0; base < n; base += SPAN) {
        long count = min(SPAN, n - base);
        read_keys(j, token, j->chosen ? j->chosen + token * j->top_k : NULL, base, count, t->keys);
        for (int h = 0; h < heads; h += 4) multiply(t->q + h * dim, t->keys, dim, count, t->scores + h);
        for (int h = 0; h < TILE_HEADS; h++) if (h < (heads + 3) / 4 * 4) soften(t, h, count);
        for (int h = 0; h < heads; h += 4) add_all_values(t, h, j, count);
    }
    for (int h = 0; h < heads; h++) {
        float total = sum_lanes(t->sum[h]);
        for (long d = 0; d < j->width; d += 8)
            store8(j->out, (token * j->heads + head + h) * j->width + d,
                   load8(t->acc, h * j->width + d, F32) / total, dtype);
    }
}

static void attend_task(const void *job, long index)
{
    const latent_job *j = job;
    const long tiles = (j->heads + TILE_HEADS - 1) / TILE_HEADS;
    head_tile t;
    if (j->dtype == BF16) attend_tile(j, index / tiles, index % tiles * TILE_HEADS, &t, BF16);
    else attend_tile(j, index / tiles, index % tiles * TILE_HEADS, &t, F32);
}

/* The row of each token of a row; those are the first ones. Sets the most positions that one sees. */
static int32_t *rows_of_tokens(latent_job *j, long rows)
{
    int32_t *row_of = malloc((size_t)(j->cu_rows[rows] + 1) * sizeof *row_of);
    if (!row_of) abort();
    for (int32_t row = 0; row < rows; row++) {
        const long count = j->cu_rows[row + 1] - j->cu_rows[row];
        for (long i = 0; i < count; i++) row_of[j->cu_rows[row] + i] = row;
        if (count && j->start[row] + count > j->longest) j->longest = j->start[row] + count;
    }
    return row_of;
}

/* q [tokens, heads, dim] -> out [tokens, heads, width]; pages [blocks, block_size, dim]. */
void surestep_latent_attend(void *out, const void *q, const void *pages, const int32_t *block_tables,
                            const int64_t *slots, const int32_t *cu_rows, const int32_t *start,
                            const int32_t *chosen, long rows, long table_width, long heads, long dim,
                            long width, long block_size, long top_k, float scale, int dtype,
                            int page_dtype)
{
    assert(dim % 8 == 0 && width % 8 == 0 && width <= dim && dim <= MAX_LATENT);
    latent_job j = {.out = out, .q = q, .pages = pages, .block_tables = block_tables, .slots = slots,
                    .cu_rows = cu_rows, .start = start, .chosen = chosen, .table_width = table_width,
                    .heads = heads, .dim = dim, .width = width, .block_size = block_size,
                    .top_k = top_k, .scale = scale, .dtype = dtype, .page_dtype = page_dtype};
    int32_t *row_of = rows_of_tokens(&j, rows);
    j.row_of = row_of;
    parallel_for(attend_task, &j, cu_rows[rows] * ((heads + TILE_HEADS - 1) / TILE_HEADS));
    free(row_of);
}

/* ---- choice ---- */

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
