/* The gated delta rule (Yang et al., 2024). */
#include "recurrent.h"

typedef struct {
    ragged r;
    void *out;
    const void *qkv, *ba;             /* [T, 2 Hk dk + Hv dv], [T, 2 Hv]: beta, then decay */
    const float *a_log, *dt_bias;     /* [Hv] */
    float *q, *k, *beta, *decay;      /* prepared inputs: [T, Hk, dk] twice, [T, Hv] twice */
    float *state, *snapshots;         /* [slots, Hv, dk, dv], [n, Hv, dk, dv] */
    float *keys, *deltas, *decays;    /* records: [slots, W, Hk, dk], [.., Hv, dv], [.., Hv] */
    long tokens, k_heads, v_heads, k_dim, v_dim, records, column_tasks;
    int dtype;
} delta_job;

/* x / |x| * scale, in a fixed order of summation. */
INLINE void normalize_head(float *to, const void *x, long at, long dim, float scale,
                           const int dtype)
{
    f8 squares = splat8(0);
    for (long i = 0; i < dim; i += 8) {
        f8 v = load8(x, at + i, dtype);
        squares = fma8(v, v, squares);
    }
    float inverse = 1.0f / sqrtf(sum_lanes(squares) + 1e-6f);
    for (long i = 0; i < dim; i += 8)
        store8(to, i, load8(x, at + i, dtype) * inverse * scale, F32);
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE void prepare_token(const delta_job *j, long t, const int dtype)
{
    const long hk = j->k_heads, hv = j->v_heads, dk = j->k_dim;
    const long width = 2 * hk * dk + hv * j->v_dim;
    const float scale = 1.0f / sqrtf((float)dk);
    for (long h = 0; h < hk; h++) {
        const long at = t * width + h * dk, to = (t * hk + h) * dk;
        normalize_head(j->q + to, j->qkv, at, dk, scale, dtype);
        normalize_head(j->k + to, j->qkv, at + hk * dk, dk, 1.0f, dtype);
    }
    for (long h = 0; h < hv; h++) {
        float b = load1(j->ba, t * 2 * hv + h, dtype), a = load1(j->ba, t * 2 * hv + hv + h, dtype);
        j->beta[t * hv + h] = 1.0f / (1.0f + expf(-b));
        j->decay[t * hv + h] = expf(-expf(j->a_log[h]) * softplus(a + j->dt_bias[h]));
    }
}

static void prepare_task(const void *job, long t)
{
    const delta_job *j = job;
    if (j->dtype == BF16) prepare_token(j, t, BF16);
    else prepare_token(j, t, F32);
}

/* Some columns of the state of one head, while a row advances it. */
typedef struct {
    f8 s[MAX_KEY_DIM][VECTORS];
    long vectors, dk, dv;
} columns;

static void load_columns(columns *w, const float *from)
{
    for (long i = 0; i < w->dk; i++)
        for (long v = 0; v < w->vectors; v++) w->s[i][v] = load8(from, i * w->dv + v * 8, F32);
}

static void store_columns(const columns *w, float *to)
{
    for (long i = 0; i < w->dk; i++)
        for (long v = 0; v < w->vectors; v++) store8(to, i * w->dv + v * 8, w->s[i][v], F32);
}

/* S = decay S + k delta^T */
INLINE void fold(columns *w, const float *k, const f8 *delta, float decay, const long vectors)
{
    for (long i = 0; i < w->dk; i++)
        for (long v = 0; v < vectors; v++)
            w->s[i][v] = fma8(splat8(k[i]), delta[v], w->s[i][v] * decay);
}

/* delta = beta (value - (decay S)^T k) */
INLINE void correction(const columns *w, f8 *delta, const float *k, const f8 *value, float beta,
                       float decay, const long vectors)
{
    f8 known[VECTORS] = {{0}};
    for (long i = 0; i < w->dk; i++)
        for (long v = 0; v < vectors; v++)
            known[v] = fma8(splat8(k[i]), w->s[i][v] * decay, known[v]);
    for (long v = 0; v < vectors; v++) delta[v] = (value[v] - known[v]) * beta;
}

INLINE void read_out(const columns *w, f8 *out, const float *q, const long vectors)
{
    for (long v = 0; v < vectors; v++) out[v] = splat8(0);
    for (long i = 0; i < w->dk; i++)
        for (long v = 0; v < vectors; v++) out[v] = fma8(splat8(q[i]), w->s[i][v], out[v]);
}

INLINE void delta_columns(const delta_job *j, long row, long head, long c, const long vectors,
                          const int dtype)
{
    const long hk = j->k_heads, hv = j->v_heads, dk = j->k_dim, dv = j->v_dim;
    const long first = j->r.cu_rows[row], n = j->r.cu_rows[row + 1] - first;
    const long slot = j->r.slots[row], k_head = head / (hv / hk);
    const long pending = j->r.pending[row], copy_at = j->r.snapshot_after[row];
    float *state = j->state + (slot * hv + head) * dk * dv + c;
    float *snapshot = j->snapshots + (j->r.snapshot_line[row] * hv + head) * dk * dv + c;
    columns w = {.vectors = vectors, .dk = dk, .dv = dv};
    f8 value[VECTORS], delta[VECTORS], out[VECTORS];

    if (j->r.start[row] == 0)
        for (long i = 0; i < dk; i++)
            for (long v = 0; v < vectors; v++) w.s[i][v] = splat8(0);
    else
        load_columns(&w, state);
    for (long t = 0; t < pending; t++) {
        const long record = slot * j->records + t;
        for (long v = 0; v < vectors; v++)
            delta[v] = load8(j->deltas, (record * hv + head) * dv + c + v * 8, F32);
        fold(&w, j->keys + (record * hk + k_head) * dk, delta, j->decays[record * hv + head],
             vectors);
        if (t + 1 == copy_at) store_columns(&w, snapshot);
    }
    if (j->r.window[row]) store_columns(&w, state);
    for (long t = 0; t < n; t++) {
        const long token = first + t, at = token * (2 * hk * dk + hv * dv) + 2 * hk * dk;
        const float *k = j->k + (token * hk + k_head) * dk;
        const float decay = j->decay[token * hv + head];
        for (long v = 0; v < vectors; v++)
            value[v] = load8(j->qkv, at + head * dv + c + v * 8, dtype);
        correction(&w, delta, k, value, j->beta[token * hv + head], decay, vectors);
        fold(&w, k, delta, decay, vectors);
        read_out(&w, out, j->q + (token * hk + k_head) * dk, vectors);
        for (long v = 0; v < vectors; v++) {
            store8(j->out, (token * hv + head) * dv + c + v * 8, out[v], dtype);
            if (j->r.window[row])
                store8(j->deltas, ((slot * j->records + t) * hv + head) * dv + c + v * 8, delta[v],
                       F32);
        }
        if (!j->r.window[row] && pending + t + 1 == copy_at) store_columns(&w, snapshot);
    }
    if (!j->r.window[row]) store_columns(&w, state);
}

static void delta_task(const void *job, long index)
{
    const delta_job *j = job;
    const long c = index % j->column_tasks * COLUMNS, head = index / j->column_tasks % j->v_heads;
    const long row = index / j->column_tasks / j->v_heads;
    const long left = (j->v_dim - c) / 8, vectors = left < VECTORS ? left : VECTORS;
    if (j->dtype == BF16) {
        if (vectors == VECTORS) delta_columns(j, row, head, c, VECTORS, BF16);
        else delta_columns(j, row, head, c, vectors, BF16);
    } else {
        if (vectors == VECTORS) delta_columns(j, row, head, c, VECTORS, F32);
        else delta_columns(j, row, head, c, vectors, F32);
    }
}

/* Keys and decays of a window become records only when all heads have folded the old ones. */
static void record_task(const void *job, long row)
{
    const delta_job *j = job;
    const long first = j->r.cu_rows[row], n = j->r.cu_rows[row + 1] - first;
    const long record = j->r.slots[row] * j->records, keys = j->k_heads * j->k_dim;
    if (!j->r.window[row]) return;
    memcpy(j->keys + record * keys, j->k + first * keys, (size_t)(n * keys) * sizeof(float));
    memcpy(j->decays + record * j->v_heads, j->decay + first * j->v_heads,
           (size_t)(n * j->v_heads) * sizeof(float));
}

/* qkv [T, 2 Hk dk + Hv dv] -> out [T, Hv, dv]; workspace holds T (2 Hk dk + 2 Hv) floats. */
void surestep_gated_delta(void *out, const void *qkv, const void *ba, const float *a_log,
                          const float *dt_bias, float *workspace, float *state, float *snapshots,
                          float *keys, float *deltas, float *decays, const int64_t *slots,
                          const int32_t *cu_rows, const int32_t *start, const int32_t *pending,
                          const int32_t *window, const int32_t *snapshot_after,
                          const int32_t *snapshot_line, long rows, long tokens, long k_heads,
                          long v_heads, long k_dim, long v_dim, long records, int dtype)
{
    assert(k_dim <= MAX_KEY_DIM && k_dim % 8 == 0 && v_dim % 8 == 0);
    float *k = workspace + tokens * k_heads * k_dim, *beta = k + tokens * k_heads * k_dim;
    delta_job j = {{rows, slots, cu_rows, start, pending, window, snapshot_after, snapshot_line},
                   out, qkv, ba, a_log, dt_bias, workspace, k, beta, beta + tokens * v_heads,
                   state, snapshots, keys, deltas, decays, tokens, k_heads, v_heads, k_dim, v_dim,
                   records, (v_dim + COLUMNS - 1) / COLUMNS, dtype};
    parallel_for(prepare_task, &j, tokens);
    parallel_for(delta_task, &j, rows * v_heads * j.column_tasks);
    parallel_for(record_task, &j, rows);
}
