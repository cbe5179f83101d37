/* Attention of many heads to one latent a position, with the online softmax of paged_attention/cpu.c.
 *
 * A token goes through the positions that it sees in order, SPAN at a time. Its result is therefore
 * bit for bit the same as a decode row, in a window of drafts and in a prefill chunk; and the same
 * whether it sees all positions or has chosen all of them.
 */
#include "latent.h"

enum { TILE_HEADS = 8, MAX_LATENT = 1024 }; /* heads of a task; elements of a latent */

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
