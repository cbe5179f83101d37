/* The arithmetic of attention over one span of positions: see attention.c. */
#pragma once

#include "halves.h"
#include "ops.h"

enum {
    SPAN = 64,        /* positions per step of the online softmax */
    GROUP = 8,        /* positions that lie side by side in a block, one vector of keys */
    GROUPS = LANES / GROUP, /* groups in a vector */
    TILE_QUERIES = 6,       /* queries that share the loads */
    /* Up to this many, a tile takes four vectors of keys or values, else two. */
    WIDE_QUERIES = LANES == 16 ? 6 : 3,
    /* For more than that, a task unpacks keys and values before it uses them. */
    SHARED_QUERIES = LANES == 16 ? 6 : 18,
    TASK_QUERIES = 144,  /* at most: they share what is unpacked */
    TASKS = 16, /* of a head: with fewer tokens a task has fewer queries, down to a quarter */
};

/* Instead of the type of the pages: the span lies in the tile's panels, unpacked. */
enum { UNPACKED = 4 };

typedef struct {
    void *out;
    const void *q;
    cache_pages pages;
    const int32_t *block_tables;
    const int64_t *slots; /* of each row: its line of the block tables */
    const int32_t *cu_rows, *start;
    const float *sinks; /* of each query head, or NULL */
    const int32_t (*tiles)[2]; /* row, first token of the tile within the row */
    long table_width, q_stride, kv_heads, group, head_dim, head_elements, block_size, tile_tokens;
    long window; /* positions that a query sees, its own included */
    float scale, value_scale; /* of what keys give, of values */
    int dtype;
    long num_tiles;
} attention_job;

/* The queries of some tokens of one row for one KV head, token by token, and their softmax. */
typedef struct {
    const attention_job *j;
    const int32_t *table;
    long kv_head;
    int count, unpacked;
    long keys[SPAN / GROUP], values[SPAN / GROUP]; /* cache index of each group of the span */
    long dims; /* of a head, up to whole vectors */
    float max[TASK_QUERIES], correction[TASK_QUERIES];
    f8 sum[TASK_QUERIES];
    _Alignas(64) float scores[TASK_QUERIES][SPAN];
    float key_scales[SPAN], value_scales[SPAN]; /* of I8 */
    float q[TASK_QUERIES * MAX_HEAD_DIM], acc[TASK_QUERIES * MAX_HEAD_DIM]; /* [count][dims] */
    float key_panel[MAX_HEAD_DIM * SPAN], value_panel[SPAN * MAX_HEAD_DIM]; /* [dims][SPAN], [SPAN][dims] */
} query_tile;

/* The scales of the group of positions from offset on. */
INLINE void find_scales(query_tile *t, long g, long head, long offset)
{
    const attention_job *j = t->j;
    const long at = head + j->head_dim * j->block_size + offset * (long)sizeof(float);
    memcpy(t->key_scales + g * GROUP, (const char *)j->pages.k + at, GROUP * sizeof(float));
    memcpy(t->value_scales + g * GROUP, (const char *)j->pages.v + at, GROUP * sizeof(float));
}

/* Look up where the positions base..base+n lie. */
static void find_groups(query_tile *t, long base, long n)
{
    const attention_job *j = t->j;
    for (long g = 0; g * GROUP < n; g++) {
        long block = (base + g * GROUP) / j->block_size, offset = (base + g * GROUP) % j->block_size;
        long head = ((long)t->table[block] * j->kv_heads + t->kv_head) * j->head_elements;
        t->keys[g] = head + offset;
        t->values[g] = head + offset * j->head_dim;
        if (j->pages.dtype == I8) find_scales(t, g, head, offset);
    }
}

/* Two groups of keys, or one where a vector has no more, for dim d. */
INLINE vf load_keys(const query_tile *t, const long *groups, long g, long d, const int dtype)
{
    if (dtype == UNPACKED) return load_f32(t->key_panel + d * SPAN + g * GROUP);
    const long row = d * t->j->block_size;
    return load_halves(t->j->pages.k, groups[0] + row, groups[GROUPS - 1] + row, dtype);
}

/* Dims from d on of the value of position p; what follows a head's last dim is never read. */
INLINE vf load_values(const query_tile *t, long p, long d, const int dtype)
{
    if (dtype == UNPACKED) return load_f32(t->value_panel + p * t->dims + d);
    const long dims = t->j->head_dim, at = t->values[p / GROUP] + p % GROUP * dims + d;
    return load_halves(t->j->pages.v, at, d + GROUP < dims ? at + GROUP : at, dtype);
}

/* Widen the positions 0..n of the span once for all queries of the tile. Where each lies is worked
 * out once, and not for every vector as load_keys and load_values do: 3 % of a long prompt. */
INLINE void unpack(query_tile *t, long n, const int dtype)
{
    const long head_dim = t->j->head_dim, dims = t->dims, row = t->j->block_size;
    const void *const k = t->j->pages.k, *const v = t->j->pages.v;
    for (long g = 0; g * GROUP < n; g += GROUPS) {
        const long a = t->keys[g], b = GROUPS > 1 && (g + 1) * GROUP < n ? t->keys[g + 1] : a;
        float *to = t->key_panel + g * GROUP;
        for (long d = 0; d < head_dim; d++) {
            vf lanes = load_halves(k, a + d * row, b + d * row, dtype);
            memcpy(to + d * SPAN, &lanes, sizeof lanes);
        }
    }
    for (long p = 0; p < n; p++) {
        const long at = t->values[p / GROUP] + p % GROUP * head_dim;
        float *to = t->value_panel + p * dims;
        for (long d = 0; d < dims; d += LANES) {
            vf lanes = load_halves(v, at + d, d + GROUP < head_dim ? at + d + GROUP : at + d, dtype);
            memcpy(to + d, &lanes, sizeof lanes);
        }
    }
}

static void unpack_span(query_tile *t, long n)
{
    if (t->j->pages.dtype == BF16) unpack(t, n, BF16);
    else if (t->j->pages.dtype == E4M3) unpack(t, n, E4M3);
    else if (t->j->pages.dtype == I8) unpack(t, n, I8);
    else unpack(t, n, F32);
}

/* Scores of the groups of keys from g. Every score is one chain over the dims of a head. */
INLINE void score(query_tile *t, int first, const int queries, const int vectors, long g, long groups,
                  const int dtype)
{
    long keys[4 * GROUPS];
    vf acc[TILE_QUERIES][4];
    for (int v = 0; v < vectors * GROUPS; v++) keys[v] = t->keys[g + v < groups ? g + v : groups - 1];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[i][v] = splat(0);
    for (long d = 0; d < t->j->head_dim; d++) {
        vf key[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            key[v] = loaded(load_keys(t, keys + v * GROUPS, g + v * GROUPS, d, dtype));
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) {
            vf q = loaded(splat(t->q[(first + i) * t->dims + d]));
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[i][v] = fma_lanes(key[v], q, acc[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            memcpy(t->scores[first + i] + (g + v * GROUPS) * GROUP, &acc[i][v], sizeof(vf));
}

/* scores -> weights e^(score - max); updates the running max and sum of the queries. Of I8 scores
 * are of the codes of keys, and weights become those of the codes of values. */
static __attribute__((noinline)) void soften(query_tile *t, int first, int queries, long from, long n)
{
    const long begin = from / LANES * LANES, end = (n + LANES - 1) / LANES * LANES;
    const int scaled = t->j->pages.dtype == I8;
    f8 change = splat8(0);
    for (int i = 0; i < queries; i++) {
        float *scores = t->scores[first + i], before = t->max[first + i];
        for (long p = begin; scaled && p < end; p += LANES) {
            vf score = load_f32(scores + p) * load_f32(t->key_scales + p);
            memcpy(scores + p, &score, sizeof score);
        }
        for (long p = begin; p < from; p++) scores[p] = -INFINITY;
        for (long p = n; p < end; p++) scores[p] = -INFINITY;
        vf peak = load_f32(scores + begin);
        for (long p = begin + LANES; p < end; p += LANES) peak = greater_lanes(load_f32(scores + p), peak);
        float top = greatest_lane(peak);
        top = top > before ? top : before;
        change[i] = before - top;
        t->max[first + i] = top;
    }
    change = exp8(change);
    memcpy(t->correction + first, &change, (size_t)queries * sizeof(float));
    for (int i = first; i < first + queries; i++) {
        f8 sum = t->sum[i] * t->correction[i];
        for (long p = begin; p < end; p += LANES) {
            vf weight = exp_lanes(load_f32(t->scores[i] + p) - t->max[i]);
            sum = add_groups(sum, weight);
            if (scaled) weight = weight * load_f32(t->value_scales + p);
            memcpy(t->scores[i] + p, &weight, sizeof weight);
        }
        t->sum[i] = sum;
    }
}

/* acc = acc * correction + weights V over the positions from..n, for `vectors` of dims from d on. */
INLINE void add_values(query_tile *t, int first, const int queries, const int vectors, long d,
                       long from, long n, const int dtype)
{
    float *sums = t->acc + first * t->dims + d;
    vf acc[TILE_QUERIES][4];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[i][v] = load_f32(sums + i * t->dims + v * LANES) * t->correction[first + i];
    for (long p = from; p < n; p++) {
        vf value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = loaded(load_values(t, p, d + v * LANES, dtype));
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) {
            vf weight = loaded(splat(t->scores[first + i][p]));
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[i][v] = fma_lanes(value[v], weight, acc[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            memcpy(sums + i * t->dims + v * LANES, &acc[i][v], sizeof(vf));
}
