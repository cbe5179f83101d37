/* Shares of adapters of low rank in a product, each row with its own adapter: see reference.py.
 * Rows of one adapter that follow each other share what is read of it; the sums of a row are made in
 * the same order in any company. */
#include <stdlib.h>

#include "rows.h"

enum { TOGETHER = 4, STRIP = 32 }; /* rows; outputs at once: a cache line of bf16 */

typedef struct {
    void *y;
    const void *x;
    const int32_t *places;
    const void *a, *b;
    const int32_t *ranks;
    const float *scales;
    const int64_t *spans;
    float *low; /* [tokens, parts * most] */
    long tokens, n, k, parts, most, num_spans, per_task;
    int dtype, y_dtype;
} adapters_job;

/* Dot products of `rows` rows of x with one of A. */
INLINE void dot_rows(float *sums, const adapters_job *j, long token, long a_at, const int rows, const int dtype)
{
    f8 even[TOGETHER], odd[TOGETHER];
    for (int row = 0; row < rows; row++) even[row] = odd[row] = splat8(0);
    long i = 0;
    for (; i + 16 <= j->k; i += 16) {
        const f8 a = load8(j->a, a_at + i, dtype), next = load8(j->a, a_at + i + 8, dtype);
        for (int row = 0; row < rows; row++) {
            const long at = (token + row) * j->k + i;
            even[row] = fma8(a, load8(j->x, at, dtype), even[row]);
            odd[row] = fma8(next, load8(j->x, at + 8, dtype), odd[row]);
        }
    }
    for (int row = 0; row < rows; row++) {
        float rest = 0;
        for (long left = i; left < j->k; left++)
            rest += load1(j->a, a_at + left, dtype) * load1(j->x, (token + row) * j->k + left, dtype);
        sums[row] = sum_lanes(even[row] + odd[row]) + rest;
    }
}

/* y of `rows` rows, outputs at..at + 8 * eights, plus low times B. */
INLINE void add_strip(const adapters_job *j, long token, long b_at, long at, const float *low, long rank,
                      const int rows, const int eights, const int dtype, const int y_dtype)
{
    const long width = j->parts * j->most;
    f8 sums[TOGETHER][STRIP / 8];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < eights; i++) sums[row][i] = splat8(0);
    for (long r = 0; r < rank; r++)
        for (int i = 0; i < eights; i++) {
            const f8 b = load8(j->b, b_at + r * j->n + at + 8 * i, dtype);
            for (int row = 0; row < rows; row++)
                sums[row][i] = fma8(splat8(low[row * width + r]), b, sums[row][i]);
        }
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < eights; i++) {
            const long y = (token + row) * j->n + at + 8 * i;
            store8(j->y, y, load8(j->y, y, y_dtype) + sums[row][i], y_dtype);
        }
}

INLINE void add_one(const adapters_job *j, long token, long b_at, long at, const float *low, long rank,
                    const int dtype, const int y_dtype)
{
    float sum = 0;
    for (long r = 0; r < rank; r++) sum = fmaf(low[r], load1(j->b, b_at + r * j->n + at, dtype), sum);
    const long y = token * j->n + at;
    store1(j->y, y, load1(j->y, y, y_dtype) + sum, y_dtype);
}

INLINE void add_rows(const adapters_job *j, long token, const int rows, const int dtype, const int y_dtype)
{
    const long place = j->places[token], width = j->parts * j->most, b_at = place * j->most * j->n;
    float *low = j->low + token * width;
    for (long part = 0; part < j->parts; part++) {
        const float scale = j->scales[place * j->parts + part];
        for (long r = 0; r < j->ranks[place * j->parts + part]; r++) {
            float sums[TOGETHER];
            dot_rows(sums, j, token, ((place * j->parts + part) * j->most + r) * j->k, rows, dtype);
            for (int row = 0; row < rows; row++) low[row * width + part * j->most + r] = scale * sums[row];
        }
    }
    for (const int64_t *span = j->spans; span < j->spans + 3 * j->num_spans; span += 3) {
        const long part = span[2], end = span[1], rank = j->ranks[place * j->parts + part];
        const float *mine = low + part * j->most;
        long at = span[0];
        if (!rank) continue;
        for (; at + STRIP <= end; at += STRIP)
            add_strip(j, token, b_at, at, mine, rank, rows, STRIP / 8, dtype, y_dtype);
        for (; at + 8 <= end; at += 8) add_strip(j, token, b_at, at, mine, rank, rows, 1, dtype, y_dtype);
        for (; at < end; at++)
            for (int row = 0; row < rows; row++)
                add_one(j, token + row, b_at, at, mine + row * width, rank, dtype, y_dtype);
    }
}

INLINE int alike(const adapters_job *j, long token, long end)
{
    for (int row = 1; row < TOGETHER; row++)
        if (token + row >= end || j->places[token + row] != j->places[token]) return 0;
    return 1;
}

INLINE void adapters_rows(const adapters_job *j, long index, const int dtype, const int y_dtype)
{
    long token = index * j->per_task, end = token + j->per_task < j->tokens ? token + j->per_task : j->tokens;
    while (token < end) {
        const int rows = alike(j, token, end) ? TOGETHER : 1;
        if (j->places[token] >= 0) {
            if (rows == TOGETHER) add_rows(j, token, TOGETHER, dtype, y_dtype);
            else add_rows(j, token, 1, dtype, y_dtype);
        }
        token += rows;
    }
}

static void adapters_task(const void *job, long index)
{
    const adapters_job *j = job;
    if (j->dtype == F32) adapters_rows(j, index, F32, F32);
    else if (j->y_dtype == F32) adapters_rows(j, index, BF16, F32);
    else adapters_rows(j, index, BF16, BF16);
}

/* y [tokens, n] += scale * B A x. Returns 0 without memory. */
int surestep_add_adapters(void *y, const void *x, const int32_t *places, const void *a, const void *b,
                          const int32_t *ranks, const float *scales, const int64_t *spans, long tokens,
                          long n, long k, long parts, long most, long num_spans, int dtype, int y_dtype)
{
    float *low = malloc(sizeof(float) * (size_t)(tokens * parts * most + 1));
    if (!low) return 0;
    adapters_job j = {y, x, places, a, b, ranks, scales, spans, low, tokens, n, k, parts, most,
                      num_spans, tokens < 4 * TOGETHER ? 1 : 2 * TOGETHER, dtype, y_dtype};
    parallel_for(adapters_task, &j, (tokens + j.per_task - 1) / j.per_task);
    free(low);
    return 1;
}
