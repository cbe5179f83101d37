/* Causal attention over the paged KV cache, with the online softmax of Milakov and Gimelshein
 * (2018) in the blocked form of FlashAttention (Dao et al., 2022).
 *
 * The positions that a query sees are cut into spans at multiples of SPAN, counted from the
 * start of its sequence. A query goes through the spans in order, alone in its arithmetic:
 * queries only share the loads. Its result is therefore bit for bit the same as a decode row,
 * in a window of drafts and in a prefill chunk. A position that a query does not see is never
 * multiplied, not even by zero: it may hold anything.
 *
 * A query begins with the sink of its head, if it has one, as if that were a position whose value
 * is zero: it is in the softmax once, however many spans follow.
 */
#include <assert.h>
#include <limits.h>
#include <stdlib.h>

#include "halves.h"
#include "ops.h"
#include "pool.h"

enum {
    SPAN = 64,        /* positions per step of the online softmax */
    GROUP = 8,        /* positions that lie side by side in a block, one vector of keys */
    GROUPS = LANES / GROUP, /* groups in a vector */
    TILE_QUERIES = 6,       /* queries that share the loads */
    /* Up to this many, a tile takes four vectors of keys or values, else two. */
    WIDE_QUERIES = LANES == 16 ? 6 : 3,
    TASK_QUERIES = 144,
    TASKS = 16, /* of a head, if a task then has a quarter of its queries or more */
};

/* Instead of the type of the pages: the span lies in the tile's panels, unpacked. */
enum { UNPACKED = 3 };

typedef struct {
    void *out;
    const void *q;
    cache_pages pages;
    const int32_t *block_tables;
    const int64_t *slots; /* of each row: its line of the block tables */
    const int32_t *cu_rows, *start;
    const float *sinks; /* of each query head, or NULL */
    const int32_t (*tiles)[2]; /* row, first token of the tile within the row */
    long table_width, q_stride, kv_heads, group, head_dim, block_size, tile_tokens;
    long window; /* positions that a query sees, its own included */
    float scale, value_scale; /* of what keys give, of values */
    int dtype;
    long tile_count;
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
    float q[TASK_QUERIES * MAX_HEAD_DIM], acc[TASK_QUERIES * MAX_HEAD_DIM]; /* [count][dims] */
    float key_panel[MAX_HEAD_DIM * SPAN], value_panel[SPAN * MAX_HEAD_DIM]; /* [dims][SPAN], [SPAN][dims] */
} query_tile;

/* Look up where the positions base..base+n lie. */
static void find_groups(query_tile *t, long base, long n)
{
    const attention_job *j = t->j;
    for (long g = 0; g * GROUP < n; g++) {
        long block = (base + g * GROUP) / j->block_size, offset = (base + g * GROUP) % j->block_size;
        long head = ((long)t->table[block] * j->kv_heads + t->kv_head) * j->head_dim * j->block_size;
        t->keys[g] = head + offset;
        t->values[g] = head + offset * j->head_dim;
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

/* Widen the positions 0..n of the span once for all queries of the tile. */
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

/* scores -> weights e^(score - max); updates the running max and sum of the queries. */
static __attribute__((noinline)) void soften(query_tile *t, int first, int queries, long from, long n)
{
    const long begin = from / LANES * LANES, end = (n + LANES - 1) / LANES * LANES;
    f8 change = splat8(0);
    for (int i = 0; i < queries; i++) {
        float *scores = t->scores[first + i], before = t->max[first + i];
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
            memcpy(t->scores[i] + p, &weight, sizeof weight);
            sum = add_groups(sum, weight);
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

/* One span for `queries` queries that all see its positions from..n. */
INLINE void attend_span(query_tile *t, int first, const int queries, long from, long n, const int dtype)
{
    const int vectors = queries <= WIDE_QUERIES ? 4 : 2;
    const long together = vectors * GROUPS;
    long groups = (n + GROUP - 1) / GROUP, d = 0;
    for (long g = from / (GROUP * together) * together; g < groups; g += together)
        score(t, first, queries, vectors, g, groups, dtype);
    soften(t, first, queries, from, n);
    for (; d + vectors * LANES <= t->j->head_dim; d += vectors * LANES)
        add_values(t, first, queries, vectors, d, from, n, dtype);
    for (; d < t->j->head_dim; d += LANES) add_values(t, first, queries, 1, d, from, n, dtype);
}

static void attend(query_tile *t, int first, int queries, long from, long n)
{
#define ATTEND(count) \
    case count: \
        if (t->unpacked) attend_span(t, first, count, from, n, UNPACKED); \
        else if (t->j->pages.dtype == BF16) attend_span(t, first, count, from, n, BF16); \
        else if (t->j->pages.dtype == E4M3) attend_span(t, first, count, from, n, E4M3); \
        else attend_span(t, first, count, from, n, F32); \
        break;
    switch (queries) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6) }
#undef ATTEND
}

/* The queries of some tokens, in pieces that fit the registers. */
static void attend_tokens(query_tile *t, long first, long last, long from, long n)
{
    const int end = (int)(last * t->j->group);
    for (int i = (int)(first * t->j->group); i < end; i += TILE_QUERIES)
        attend(t, i, end - i < TILE_QUERIES ? end - i : TILE_QUERIES, from, n);
}

INLINE long clamp(long x, long least, long most) { return x < least ? least : x > most ? most : x; }

/* What tokens first..last of the tile, each by itself, see of a span; token 0 sees `seen` positions
 * but for its window. */
static void attend_alone(query_tile *t, long first, long last, long seen, long base)
{
    for (long i = first; i < last; i++) {
        long n = clamp(seen + i - base, 0, SPAN), from = clamp(seen + i - t->j->window - base, 0, n);
        if (from < n) attend_tokens(t, i, i + 1, from, n);
    }
}

INLINE long head_of(const query_tile *t, int i) { return t->kv_head * t->j->group + i % t->j->group; }

/* Index in q (with its stride) or out of the first element of query i. */
INLINE long query_index(const query_tile *t, long first_token, int i, long stride)
{
    return (first_token + i / t->j->group) * stride + head_of(t, i) * t->j->head_dim;
}

INLINE void begin(query_tile *t, long first_token, const int dtype)
{
    const attention_job *j = t->j;
    memset(t->acc, 0, (size_t)(t->count * t->dims) * sizeof *t->acc);
    for (int i = 0; i < t->count; i++) {
        long from = query_index(t, first_token, i, j->q_stride);
        t->max[i] = j->sinks ? j->sinks[head_of(t, i)] : -INFINITY;
        t->sum[i] = (f8){j->sinks ? 1.0f : 0.0f};
        for (long d = 0; d < j->head_dim; d += 8)
            store8(t->q, i * t->dims + d, load8(j->q, from + d, dtype) * j->scale, F32);
    }
}

INLINE void finish(const query_tile *t, long first_token, const int dtype)
{
    const attention_job *j = t->j;
    for (int i = 0; i < t->count; i++) {
        long to = query_index(t, first_token, i, j->kv_heads * j->group * j->head_dim);
        float total = sum_lanes(t->sum[i]);
        for (long d = 0; d < j->head_dim; d += 8)
            store8(j->out, to + d, load8(t->acc, i * t->dims + d, F32) * j->value_scale / total, dtype);
    }
}

static void attention_task(const void *job, long index)
{
    const attention_job *j = job;
    const int32_t *tile = j->tiles[j->tile_count - 1 - index % j->tile_count];
    long row = tile[0], first_token = j->cu_rows[row] + tile[1];
    long left = j->cu_rows[row + 1] - first_token;
    int tokens = (int)(left < j->tile_tokens ? left : j->tile_tokens), group = (int)j->group;
    query_tile t;
    t.j = j;
    t.table = j->block_tables + j->slots[row] * j->table_width;
    t.kv_head = index / j->tile_count;
    t.count = tokens * group;
    t.unpacked = t.count > TILE_QUERIES;
    t.dims = (j->head_dim + LANES - 1) / LANES * LANES;
    if (j->dtype == BF16) begin(&t, first_token, BF16);
    else begin(&t, first_token, F32);
    long seen = j->start[row] + tile[1] + 1; /* positions up to the first token's own */
    for (long base = clamp(seen - j->window, 0, seen) / SPAN * SPAN; base < seen + tokens - 1; base += SPAN) {
        /* Tokens that see the whole span share it; those before and behind take the part that they see. */
        long first = clamp(base + SPAN - seen, 0, tokens);
        long last = clamp(base + j->window - seen + 1, first, tokens);
        find_groups(&t, base, clamp(seen + tokens - 1 - base, 0, SPAN));
        if (t.unpacked) unpack_span(&t, clamp(seen + tokens - 1 - base, 0, SPAN));
        attend_tokens(&t, first, last, 0, SPAN);
        attend_alone(&t, 0, first, seen, base);
        attend_alone(&t, last, tokens, seen, base);
    }
    if (j->dtype == BF16) finish(&t, first_token, BF16);
    else finish(&t, first_token, F32);
}

/* q and out [cu_rows[rows], kv_heads * group, head_dim]; q's token stride in elements. */
void surestep_paged_attention(void *out, const void *q, const cache_pages *pages,
                              const int32_t *block_tables, const int64_t *slots,
                              const int32_t *cu_rows, const int32_t *start, const float *sinks,
                              long rows, long table_width, long q_stride, long kv_heads, long group,
                              long head_dim, long block_size, long window, float scale, int dtype)
{
    assert(group <= TASK_QUERIES / 4 && head_dim <= MAX_HEAD_DIM);
    const float unit = pages->dtype == E4M3 ? 256 : 1; /* see load8 */
    const long tile_tokens = clamp(cu_rows[rows] / TASKS * group, TASK_QUERIES / 4, TASK_QUERIES) / group;
    attention_job j = {out, q, *pages, block_tables, slots, cu_rows, start, sinks, NULL, table_width,
                       q_stride, kv_heads, group, head_dim, block_size, tile_tokens,
                       window ? window : LONG_MAX / 2, scale * pages->k_scale * unit,
                       pages->v_scale * unit, dtype};
    int32_t (*tiles)[2] = malloc((size_t)(cu_rows[rows] + 1) * sizeof *tiles);
    long count = 0;
    if (!tiles) abort();
    for (int32_t row = 0; row < rows; row++)
        for (int32_t token = 0; token < cu_rows[row + 1] - cu_rows[row]; token += (int32_t)j.tile_tokens) {
            tiles[count][0] = row;
            tiles[count++][1] = token;
        }
    j.tile_count = count;
    j.tiles = (const int32_t (*)[2])tiles;
    parallel_for(attention_task, &j, count * kv_heads);
    free(tiles);
}
