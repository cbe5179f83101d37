/* The arithmetic of attention over one span of positions: see cpu.c.
 *
 * Where the machine multiplies pairs of bf16, queries in bf16 and pages that bf16 can hold are
 * multiplied so, with half the instructions: two dims of a key side by side in a lane, and two
 * positions of a value. The products are exact, the weights of values are rounded to bf16. */
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
    const int32_t *cu_rows, *start, *wider;
    const float *sinks; /* of each query head, or NULL */
    const int32_t (*tiles)[2]; /* row, first token of the tile within the row */
    long table_width, q_stride, kv_heads, group, head_dim, head_elements, block_size, tile_tokens;
    long window; /* positions that a query sees, its own included; those of some rows are wider */
    float scale, value_scale; /* of what keys give, of values */
    float softcap; /* of scores; 0 = none */
    int dtype;
    long num_tiles;
} attention_job;

/* The queries of some tokens of one row for one KV head, token by token, and their softmax. */
typedef struct {
    const attention_job *j;
    const int32_t *table;
    long kv_head, window;
    int count, unpacked, pairs;
    long keys[SPAN / GROUP], values[SPAN / GROUP]; /* cache index of each group of the span */
    long dims; /* of a head, up to whole vectors */
    float max[TASK_QUERIES], correction[TASK_QUERIES];
    f8 sum[TASK_QUERIES];
    _Alignas(64) float scores[TASK_QUERIES][SPAN];
    float key_scales[SPAN], value_scales[SPAN]; /* of I8 */
    float q[TASK_QUERIES * MAX_HEAD_DIM], acc[TASK_QUERIES * MAX_HEAD_DIM]; /* [count][dims] */
    /* [dims][SPAN], [SPAN][dims]; of pairs half as many of what comes first, as in q and scores */
    float key_panel[MAX_HEAD_DIM * SPAN], value_panel[SPAN * MAX_HEAD_DIM];
} query_tile;

INLINE int has_pairs(const attention_job *j)
{
    return HAS_DOT && j->dtype == BF16 && j->pages.dtype != F32;
}

/* The lanes of two vectors, which bf16 can hold, side by side. */
INLINE vf pair_lanes(vf low, vf high) { return (vf)((vu)low >> 16 | ((vu)high & 0xffff0000)); }

/* w * x + sum, w and x of pairs or not. */
INLINE vf add_products(vf w, vf x, vf sum, const int pairs)
{
#if HAS_DOT
    if (pairs) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#endif
    (void)pairs;
    return fma_lanes(w, x, sum);
}

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

/* Keys of the groups at a and b for dim d, or the pair of d and the next. */
INLINE vf read_keys(const query_tile *t, long a, long b, long d, const int dtype, const int pairs)
{
    const long row = t->j->block_size;
    const void *k = t->j->pages.k;
    vf lanes = load_halves(k, a + d * row, b + d * row, dtype);
    if (!pairs) return lanes;
    return pair_lanes(lanes, load_halves(k, a + (d + 1) * row, b + (d + 1) * row, dtype));
}

/* Dims from d on of the value at `at`, or of it and the next; what follows a head's last is not read. */
INLINE vf read_values(const query_tile *t, long at, long d, const int dtype, const int pairs)
{
    const long dims = t->j->head_dim, next = d + GROUP < dims ? GROUP : 0;
    const void *v = t->j->pages.v;
    vf lanes = load_halves(v, at + d, at + d + next, dtype);
    if (!pairs) return lanes;
    return pair_lanes(lanes, load_halves(v, at + dims + d, at + dims + d + next, dtype));
}

/* Two groups of keys, or one where a vector has no more. */
INLINE vf load_keys(const query_tile *t, const long *groups, long g, long d, const int dtype, const int pairs)
{
    if (dtype == UNPACKED) return load_f32(t->key_panel + d / (1 + pairs) * SPAN + g * GROUP);
    return read_keys(t, groups[0], groups[GROUPS - 1], d, dtype, pairs);
}

INLINE vf load_values(const query_tile *t, long p, long d, const int dtype, const int pairs)
{
    if (dtype == UNPACKED) return load_f32(t->value_panel + p / (1 + pairs) * t->dims + d);
    return read_values(t, t->values[p / GROUP] + p % GROUP * t->j->head_dim, d, dtype, pairs);
}

/* Widen the positions 0..n of the span once for all queries of the tile. Where each lies is worked
 * out once, and not for every vector as load_keys and load_values do: 3 % of a long prompt. */
INLINE void unpack(query_tile *t, long n, const int dtype, const int pairs)
{
    const long dims = t->dims, head_dim = t->j->head_dim, step = 1 + pairs;
    for (long g = 0; g * GROUP < n; g += GROUPS) {
        const long a = t->keys[g], b = GROUPS > 1 && (g + 1) * GROUP < n ? t->keys[g + 1] : a;
        float *to = t->key_panel + g * GROUP;
        for (long d = 0; d < head_dim; d += step, to += SPAN) {
            vf lanes = read_keys(t, a, b, d, dtype, pairs);
            memcpy(to, &lanes, sizeof lanes);
        }
    }
    float *to = t->value_panel;
    for (long p = 0; p < n; p += step, to += dims) {
        const long at = t->values[p / GROUP] + p % GROUP * head_dim;
        for (long d = 0; d < dims; d += LANES) {
            vf lanes = read_values(t, at, d, dtype, pairs);
            memcpy(to + d, &lanes, sizeof lanes);
        }
    }
}

/* Calls OP(arguments..., type of the pages, of pairs or not). */
#if HAS_DOT
#define BY_PAIRS(t, op, ...) if ((t)->pairs) op(__VA_ARGS__, 1); else op(__VA_ARGS__, 0);
#else
#define BY_PAIRS(t, op, ...) op(__VA_ARGS__, 0);
#endif
#define BY_PAGES(t, op, ...) \
    if ((t)->j->pages.dtype == BF16) { BY_PAIRS(t, op, __VA_ARGS__, BF16) } \
    else if ((t)->j->pages.dtype == E4M3) { BY_PAIRS(t, op, __VA_ARGS__, E4M3) } \
    else if ((t)->j->pages.dtype == I8) { BY_PAIRS(t, op, __VA_ARGS__, I8) } \
    else op(__VA_ARGS__, F32, 0);

static void unpack_span(query_tile *t, long n) { BY_PAGES(t, unpack, t, n) }

/* Scores of the groups of keys from g. Every score is one chain over the dims of a head. */
INLINE void score(query_tile *t, int first, const int queries, const int vectors, long g, long groups,
                  const int dtype, const int pairs)
{
    long keys[4 * GROUPS];
    vf acc[TILE_QUERIES][4];
    for (int v = 0; v < vectors * GROUPS; v++) keys[v] = t->keys[g + v < groups ? g + v : groups - 1];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[i][v] = splat(0);
    const float *q_row = t->q + first * t->dims;
    for (long d = 0; d < t->j->head_dim; d += 1 + pairs, q_row++) {
        vf key[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            key[v] = loaded(load_keys(t, keys + v * GROUPS, g + v * GROUPS, d, dtype, pairs));
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) {
            vf q = loaded(splat(q_row[i * t->dims]));
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[i][v] = add_products(key[v], q, acc[i][v], pairs);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (pairs) acc[i][v] *= t->j->scale; /* otherwise q has it */
            memcpy(t->scores[first + i] + (g + v * GROUPS) * GROUP, &acc[i][v], sizeof(vf));
        }
}

/* In the place of scores that were read. */
INLINE void store_weights(query_tile *t, int i, long p, vf weights)
{
#if HAS_DOT
    if (t->pairs) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weights);
        memcpy((char *)t->scores[i] + 2 * p, &narrow, sizeof narrow);
        return;
    }
#endif
    memcpy(t->scores[i] + p, &weights, sizeof weights);
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
        for (long p = begin; t->j->softcap != 0 && p < end; p += LANES) {
            vf score = cap_lanes(load_f32(scores + p), t->j->softcap);
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
            store_weights(t, i, p, weight);
        }
        t->sum[i] = sum;
    }
}

/* Position p, or p and the next, of which only those in the mask `seen` are used. */
INLINE void add_value(const query_tile *t, vf acc[][4], int first, const int queries, const int vectors,
                      long d, long p, const uint32_t seen, const int dtype, const int pairs)
{
    vf value[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        value[v] = load_values(t, p, d + v * LANES, dtype, pairs);
        value[v] = loaded(seen == UINT32_MAX ? value[v] : (vf)((vu)value[v] & seen));
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++) {
        vf weight = splat(t->scores[first + i][p / (1 + pairs)]);
        weight = loaded(seen == UINT32_MAX ? weight : (vf)((vu)weight & seen));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[i][v] = add_products(value[v], weight, acc[i][v], pairs);
    }
}

/* acc = acc * correction + weights V over the positions from..n, for `vectors` of dims from d on. */
INLINE void add_values(query_tile *t, int first, const int queries, const int vectors, long d,
                       long from, long n, const int dtype, const int pairs)
{
    float *sums = t->acc + first * t->dims + d;
    vf acc[TILE_QUERIES][4];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[i][v] = load_f32(sums + i * t->dims + v * LANES) * t->correction[first + i];
    long p = from;
    if (pairs && p % 2) add_value(t, acc, first, queries, vectors, d, p++ - 1, 0xffff0000, dtype, pairs);
    for (; p + pairs < n; p += 1 + pairs)
        add_value(t, acc, first, queries, vectors, d, p, UINT32_MAX, dtype, pairs);
    if (p < n) add_value(t, acc, first, queries, vectors, d, p, 0xffff, dtype, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            memcpy(sums + i * t->dims + v * LANES, &acc[i][v], sizeof(vf));
}
