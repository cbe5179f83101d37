/* What attention to latents and the choice of positions share: jobs, and products with what pages
 * hold. See surestep_kernels/latent_attention/reference.py.
 *
 * A token is alone in its arithmetic: what its heads share are the loads.
 */
#pragma once

#include <assert.h>
#include <stdlib.h>

#include "pool.h"
#include "vec.h"

enum { FP8 = 2 };   /* of pages, beside F32 and BF16 */
enum { SPAN = 32 }; /* positions that are widened at once */

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
