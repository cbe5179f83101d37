/* Causal attention over the paged KV cache, with the online softmax of Milakov and Gimelshein
 * (2018) in the blocked form of FlashAttention (Dao et al., 2022).
 *
 * The positions that a query sees are cut into spans at multiples of SPAN, counted from the
 * start of its sequence. A query goes through the spans in order, alone in its arithmetic:
 * queries only share the loads, and many of them keys and values that are widened once. Its result
 * is therefore bit for bit the same as a decode row, in a window of drafts and in a prefill chunk.
 * A position that a query does not see is never multiplied, not even by zero: it may hold anything.
 * In a pair zero stands in its place.
 *
 * A query begins with the sink of its head, if it has one, as if that were a position whose value
 * is zero: it is in the softmax once, however many spans follow.
 */
#include <assert.h>
#include <limits.h>
#include <stdlib.h>

#include "attention.h"
#include "pool.h"

/* One span for `queries` queries that all see its positions from..n. */
INLINE void attend_span(query_tile *t, int first, const int queries, long from, long n, const int dtype,
                        const int pairs)
{
    const int vectors = queries <= WIDE_QUERIES ? 4 : 2;
    const long together = vectors * GROUPS;
    long groups = (n + GROUP - 1) / GROUP, d = 0;
    for (long g = from / (GROUP * together) * together; g < groups; g += together)
        score(t, first, queries, vectors, g, groups, dtype, pairs);
    soften(t, first, queries, from, n);
    for (; d + vectors * LANES <= t->j->head_dim; d += vectors * LANES)
        add_values(t, first, queries, vectors, d, from, n, dtype, pairs);
    for (; d < t->j->head_dim; d += LANES) add_values(t, first, queries, 1, d, from, n, dtype, pairs);
}

static void attend(query_tile *t, int first, int queries, long from, long n)
{
#define ATTEND(count) \
    case count: \
        if (t->unpacked) { BY_PAIRS(t, attend_span, t, first, count, from, n, UNPACKED) } \
        else { BY_PAGES(t, attend_span, t, first, count, from, n) } \
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
        long n = clamp(seen + i - base, 0, SPAN), from = clamp(seen + i - t->window - base, 0, n);
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
        if (t->pairs) memcpy(t->q + i * t->dims, element(j->q, from, BF16), (size_t)j->head_dim * 2);
        for (long d = 0; !t->pairs && d < j->head_dim; d += 8)
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
    /* The last tokens of a prompt see the most: their tasks come first, so that none comes late. */
    const int32_t *tile = j->tiles[j->num_tiles - 1 - index / j->kv_heads];
    long row = tile[0], first_token = j->cu_rows[row] + tile[1];
    long left = j->cu_rows[row + 1] - first_token;
    int tokens = (int)(left < j->tile_tokens ? left : j->tile_tokens), group = (int)j->group;
    query_tile t;
    t.j = j;
    t.table = j->block_tables + j->slots[row] * j->table_width;
    t.kv_head = index % j->kv_heads;
    t.window = j->window + (j->wider ? j->wider[row] : 0);
    t.count = tokens * group;
    t.unpacked = t.count > SHARED_QUERIES;
    t.pairs = has_pairs(j);
    t.dims = (j->head_dim + LANES - 1) / LANES * LANES;
    if (j->dtype == BF16) begin(&t, first_token, BF16);
    else begin(&t, first_token, F32);
    long seen = j->start[row] + tile[1] + 1; /* positions up to the first token's own */
    for (long base = clamp(seen - t.window, 0, seen) / SPAN * SPAN; base < seen + tokens - 1; base += SPAN) {
        /* Tokens that see the whole span share it; those before and behind take the part that they see. */
        long first = clamp(base + SPAN - seen, 0, tokens);
        long last = clamp(base + t.window - seen + 1, first, tokens);
        long n = clamp(seen + tokens - 1 - base, 0, SPAN);
        find_groups(&t, base, n);
        if (t.unpacked) unpack_span(&t, n);
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
                              const int32_t *cu_rows, const int32_t *start,
                              const int32_t *wider, const float *sinks,
                              long rows, long table_width, long q_stride, long kv_heads, long group,
                              long head_dim, long block_size, long window, float scale,
                              float softcap, int dtype)
{
    assert(group <= TASK_QUERIES / 4 && head_dim <= MAX_HEAD_DIM);
    const float unit = pages->dtype == E4M3 ? 256 : 1; /* see load8 */
    const long tile_tokens = clamp(cu_rows[rows] / TASKS * group, TASK_QUERIES / 4, TASK_QUERIES) / group;
    attention_job j = {out, q, *pages, block_tables, slots, cu_rows, start, wider, sinks, NULL,
                       table_width, q_stride, kv_heads, group, head_dim, head_elements(pages, head_dim, block_size),
                       block_size, tile_tokens, window ? window : LONG_MAX / 2, scale * pages->k_scale * unit,
                       pages->v_scale * unit, softcap, dtype};
    int32_t (*tiles)[2] = malloc((size_t)(cu_rows[rows] + 1) * sizeof *tiles);
    long count = 0;
    if (!tiles) abort();
    for (int32_t row = 0; row < rows; row++)
        for (int32_t token = 0; token < cu_rows[row + 1] - cu_rows[row]; token += (int32_t)j.tile_tokens) {
            tiles[count][0] = row;
            tiles[count++][1] = token;
        }
    j.num_tiles = count;
    j.tiles = (const int32_t (*)[2])tiles;
    parallel_for(attention_task, &j, count * kv_heads);
    free(tiles);
}
