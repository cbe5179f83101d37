/* Decoder layers in one call: the ops of the other files, one after the other, on memory that is
 * kept between calls. Calls from the interpreter cost more than most of these ops. */
#include <stdlib.h>

#include "linear.h"
#include "ops.h"
#include "pool.h"

typedef struct {
    const void *data;
    const float *bias; /* or NULL */
    long n, k, group;
    int format;
} packed_weight;

/* As cpu.py fills it in; see DenseLayer. */
typedef struct {
    packed_weight qkv, out, gate_up, down;
    const float *q_norm, *k_norm; /* both or neither */
    const float *post_norm, *next_norm, *cos_sin, *sinks;
    long q_heads, kv_heads, head_dim, rotary_dim, window;
    float head_eps, eps, scale;
    int dtype;
} dense_layer;

/* The tokens of a step; see LayerTokens. */
typedef struct {
    const int64_t *positions, *kv_slots;
    const int32_t *block_tables;
    const int64_t *slots;
    const int32_t *cu_rows, *start, *wider;
    long tokens, rows, table_width, block_size;
} layer_tokens;

static void multiply(void *y, const void *x, const packed_weight *w, long rows, int dtype, int stream)
{
    linear_multiply(y, x, w->data, w->bias, rows, w->n, w->k, w->group, w->format, dtype, dtype, stream);
}

typedef struct {
    const dense_layer *layer;
    char *heads; /* of the first token */
    long token_bytes;
} norm_job;

static void norm_task(const void *job, long token)
{
    const norm_job *j = job;
    const dense_layer *l = j->layer;
    char *q = j->heads + token * j->token_bytes;
    char *k = q + l->q_heads * l->head_dim * element_size(l->dtype);
    surestep_rms_norm(q, q, NULL, l->q_norm, l->head_eps, l->q_heads, l->head_dim, l->dtype);
    surestep_rms_norm(k, k, NULL, l->k_norm, l->head_eps, l->kv_heads, l->head_dim, l->dtype);
}

static void *part(char **free, long rows, long width, int dtype)
{
    char *start = *free;
    *free += (rows * width * element_size(dtype) + 63) / 64 * 64;
    return start;
}

/* Rows of `width` elements in all. */
static char *room(long rows, long width, int dtype)
{
    static _Thread_local struct { void *data; size_t size; } kept;
    size_t bytes = (size_t)(rows * width * element_size(dtype)) + 4 * 64;
    if (kept.size < bytes) {
        free(kept.data);
        kept.size = bytes;
        if (posix_memalign(&kept.data, 64, bytes)) abort();
    }
    return kept.data;
}

/* Projects x to heads, stores keys and values, and leaves attention's result in `out`. */
static void attend(const dense_layer *l, const layer_tokens *t, void *out, char *heads,
                   const void *x, const cache_pages *pages, int stream)
{
    const long size = element_size(l->dtype), width = l->qkv.n, dims = l->head_dim;
    char *k = heads + l->q_heads * dims * size, *v = k + l->kv_heads * dims * size;
    multiply(heads, x, &l->qkv, t->tokens, l->dtype, stream);
    if (l->q_norm) {
        norm_job j = {l, heads, width * size};
        parallel_for(norm_task, &j, t->tokens);
    }
    surestep_rotary(heads, k, t->positions, l->cos_sin, t->tokens, width, width, l->q_heads,
                    l->kv_heads, dims, l->rotary_dim, l->dtype);
    surestep_store_kv(pages, k, v, t->kv_slots, t->tokens, width, width, l->kv_heads, dims,
                      t->block_size, l->dtype);
    surestep_paged_attention(out, heads, pages, t->block_tables, t->slots, t->cu_rows, t->start,
                             t->wider, l->sinks, t->rows, t->table_width, width, l->kv_heads,
                             l->q_heads / l->kv_heads, dims, t->block_size, l->window, l->scale,
                             0, l->dtype);
}

/* x [tokens, inputs of the heads] may be y; residual and y [tokens, width of the model]. */
static void run_layer(void *y, const void *x, void *residual, const dense_layer *l,
                      const layer_tokens *t, const cache_pages *pages, int stream)
{
    const long rows = t->tokens, attended = l->out.k, inner = l->down.k, width = l->down.n;
    const int dtype = l->dtype;
    char *free = room(rows, l->qkv.n + attended + 3 * inner + width, dtype);
    void *heads = part(&free, rows, l->qkv.n, dtype), *values = part(&free, rows, attended, dtype);
    void *up = part(&free, rows, 2 * inner, dtype), *active = part(&free, rows, inner, dtype);
    void *made = part(&free, rows, width, dtype);
    attend(l, t, values, heads, x, pages, stream);
    multiply(made, values, &l->out, rows, dtype, stream);
    surestep_rms_norm(y, made, residual, l->post_norm, l->eps, rows, width, dtype);
    multiply(up, y, &l->gate_up, rows, dtype, stream);
    surestep_silu_and_mul(active, up, rows, inner, dtype);
    multiply(made, active, &l->down, rows, dtype, stream);
    surestep_rms_norm(y, made, residual, l->next_norm, l->eps, rows, width, dtype);
}

static long weight_bytes(const packed_weight *w) { return linear_bytes(w->n, w->k, w->group, w->format); }

static long layer_bytes(const dense_layer *l)
{
    return weight_bytes(&l->qkv) + weight_bytes(&l->out) + weight_bytes(&l->gate_up) + weight_bytes(&l->down);
}

void surestep_dense_layers(void *y, const void *x, void *residual, const dense_layer *layers,
                           const layer_tokens *const *tokens, const cache_pages *pages, long count)
{
    long bytes = 0;
    for (long i = 0; i < count; i++) bytes += layer_bytes(layers + i);
    const int stream = linear_streams(bytes);
    for (long i = 0; i < count; i++)
        run_layer(y, i ? y : x, residual, layers + i, tokens[i], pages + i, stream);
}
