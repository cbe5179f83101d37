/* Ops that treat each row alone: norms, the gated activation, rotary embedding, KV store. */
#include "halves.h"
#include "ops.h"
#include "rows.h"

/* ---- rms_norm ---- */

typedef struct {
    row_range range;
    void *out, *residual; /* residual may be NULL */
    const void *x;
    const float *weight;
    float eps;
} norm_job;

INLINE void norm_row(const norm_job *j, long row, const int dtype)
{
    const long width = j->range.width, base = row * width;
    const void *x = j->residual ? j->residual : j->x;
    f8 squares = {0};
    float tail = 0;
    long i = 0;
    for (; i + 8 <= width; i += 8) {
        f8 v = load8(j->x, base + i, dtype);
        if (j->residual) {
            v = rounded8(v + load8(j->residual, base + i, dtype), dtype);
            store8(j->residual, base + i, v, dtype);
        }
        squares = fma8(v, v, squares);
    }
    for (; i < width; i++) {
        if (j->residual)
            store1(j->residual, base + i,
                   load1(j->x, base + i, dtype) + load1(j->residual, base + i, dtype), dtype);
        float v = load1(x, base + i, dtype);
        tail += v * v;
    }
    float inverse = 1.0f / sqrtf((sum_lanes(squares) + tail) / (float)width + j->eps);
    for (i = 0; i + 8 <= width; i += 8) {
        f8 v = rounded8(load8(x, base + i, dtype) * inverse, dtype);
        store8(j->out, base + i, v * load8(j->weight, i, F32), dtype);
    }
    for (; i < width; i++) {
        float v[1];
        store1(v, 0, load1(x, base + i, dtype) * inverse, dtype);
        store1(j->out, base + i, load1(v, 0, dtype) * j->weight[i], dtype);
    }
}

static void norm_task(const void *job, long index)
{
    const norm_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, norm_row, j, row);
}

/* out = norm(x) * weight, all [rows, width]; with a residual, residual += x and its norm. */
void surestep_rms_norm(void *out, const void *x, void *residual, const float *weight, float eps,
                       long rows, long width, int dtype)
{
    norm_job j = {make_range(rows, width, dtype), out, residual, x, weight, eps};
    run_rows(norm_task, &j, &j.range);
}

/* ---- silu_and_mul, clamped_swiglu ---- */

typedef struct {
    row_range range;
    void *out;
    const void *x;
    float limit; /* of clamped_swiglu; 0: silu_and_mul */
} gate_job;

INLINE vf select_lanes(vi mask, vf yes, vf no)
{
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

INLINE vf gate_lanes(const gate_job *j, vf gate, vf up, const int dtype)
{
    if (j->limit == 0) {
        const vf silu = gate / (1.0f + exp_any(-gate));
        return (dtype == BF16 ? (vf)(round_lanes(silu) << 16) : silu) * up;
    }
    const vf most = splat(j->limit); /* comparisons let NaN pass */
    gate = select_lanes(gate > most, most, gate);
    up = select_lanes(up > most, most, select_lanes(up < -most, -most, up));
    return (up + 1.0f) * (gate * sigmoid_lanes(1.702f * gate));
}

INLINE void gate_row(const gate_job *j, long row, const int dtype)
{
    const long width = j->range.width, gate = row * 2 * width, up = gate + width;
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vf g = load_halves(j->x, gate + i, gate + i + 8, dtype);
        const vf u = load_halves(j->x, up + i, up + i + 8, dtype);
        store_lanes(j->out, row * width + i, gate_lanes(j, g, u, dtype), dtype);
    }
    for (; i < width; i++) {
        const vf g = splat(load1(j->x, gate + i, dtype)), u = splat(load1(j->x, up + i, dtype));
        store1(j->out, row * width + i, gate_lanes(j, g, u, dtype)[0], dtype);
    }
}

static void gate_task(const void *job, long index)
{
    const gate_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, gate_row, j, row);
}

/* x [rows, 2 * width] -> out [rows, width]. */
void surestep_silu_and_mul(void *out, const void *x, long rows, long width, int dtype)
{
    gate_job j = {make_range(rows, width, dtype), out, x, 0};
    run_rows(gate_task, &j, &j.range);
}

/* The same; limit > 0. */
void surestep_clamped_swiglu(void *out, const void *x, float limit, long rows, long width,
                             int dtype)
{
    gate_job j = {make_range(rows, width, dtype), out, x, limit};
    run_rows(gate_task, &j, &j.range);
}

/* ---- rotary ---- */

typedef struct {
    row_range range; /* width: elements of the q and k of a token */
    void *q, *k;
    const int64_t *positions;
    const float *cos_sin;
    long q_stride, k_stride, q_heads, k_heads, head_dim, rotary_dim;
} rotary_job;

INLINE void rotate_head(void *x, long base, const float *cos_sin, long half, const int dtype)
{
    long i = 0;
    for (; i + 8 <= half; i += 8) {
        f8 cosine = load8(cos_sin, i, F32), sine = load8(cos_sin, half + i, F32);
        f8 a = load8(x, base + i, dtype), b = load8(x, base + half + i, dtype);
        store8(x, base + i, fma8(a, cosine, -(b * sine)), dtype);
        store8(x, base + half + i, fma8(b, cosine, a * sine), dtype);
    }
    for (; i < half; i++) {
        float cosine = cos_sin[i], sine = cos_sin[half + i];
        float a = load1(x, base + i, dtype), b = load1(x, base + half + i, dtype);
        store1(x, base + i, a * cosine - b * sine, dtype);
        store1(x, base + half + i, b * cosine + a * sine, dtype);
    }
}

INLINE void rotary_row(const rotary_job *j, long row, const int dtype)
{
    const float *cos_sin = j->cos_sin + j->positions[row] * j->rotary_dim;
    for (long h = 0; h < j->q_heads; h++)
        rotate_head(j->q, row * j->q_stride + h * j->head_dim, cos_sin, j->rotary_dim / 2, dtype);
    for (long h = 0; h < j->k_heads; h++)
        rotate_head(j->k, row * j->k_stride + h * j->head_dim, cos_sin, j->rotary_dim / 2, dtype);
}

static void rotary_task(const void *job, long index)
{
    const rotary_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, rotary_row, j, row);
}

/* q [rows, q_heads, head_dim] and k likewise, the first rotary_dim of each head rotated in place;
 * strides in elements. */
void surestep_rotary(void *q, void *k, const int64_t *positions, const float *cos_sin, long rows,
                     long q_stride, long k_stride, long q_heads, long k_heads, long head_dim,
                     long rotary_dim, int dtype)
{
    rotary_job j = {make_range(rows, (q_heads + k_heads) * head_dim, dtype), q, k, positions,
                    cos_sin, q_stride, k_stride, q_heads, k_heads, head_dim, rotary_dim};
    run_rows(rotary_task, &j, &j.range);
}
