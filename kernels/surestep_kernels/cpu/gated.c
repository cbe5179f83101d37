/* Row-wise ops of gated layers and of routed experts. */
#include <assert.h>

#include "rows.h"

typedef struct {
    row_range range;
    long groups;
    void *out;
    const void *x, *gate;
    const float *weight;
    long x_stride, gate_stride, gate_width;
    float eps;
} gated_job;

/* ---- rms_norm_gated ---- */

INLINE void norm_group(const gated_job *j, long row, long group, const int dtype)
{
    const long width = j->range.width / j->groups, at = row * j->range.width + group * width;
    const long gate = row * j->gate_stride + group * width;
    f8 squares = splat8(0);
    for (long i = 0; i < width; i += 8) {
        f8 v = load8(j->x, at + i, dtype);
        squares = fma8(v, v, squares);
    }
    float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)width + j->eps);
    for (long i = 0; i < width; i += 8) {
        f8 v = rounded8(load8(j->x, at + i, dtype) * inverse, dtype) * load8(j->weight, i, F32);
        store8(j->out, at + i, rounded8(v, dtype) * silu8(load8(j->gate, gate + i, dtype)), dtype);
    }
}

INLINE void gated_norm_row(const gated_job *j, long row, const int dtype)
{
    for (long group = 0; group < j->groups; group++) norm_group(j, row, group, dtype);
}

static void norm_task(const void *job, long index)
{
    const gated_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, gated_norm_row, j, row);
}

/* x [rows, groups, width]: each group normalised, scaled, times silu of its gate. */
void surestep_rms_norm_gated(void *out, const void *x, const void *gate, const float *weight,
                             float eps, long rows, long groups, long width, long gate_stride,
                             int dtype)
{
    assert(width % 8 == 0);
    gated_job j = {.range = make_range(rows, groups * width, dtype), .groups = groups, .out = out,
                   .x = x, .gate = gate, .weight = weight, .gate_stride = gate_stride, .eps = eps};
    run_rows(norm_task, &j, &j.range);
}

/* ---- mul_sigmoid ---- */

INLINE void sigmoid_row(const gated_job *j, long row, const int dtype)
{
    const long at = row * j->x_stride, gate = row * j->gate_stride;
    f8 one = j->gate_width == 1 ? sigmoid8(splat8(load1(j->gate, gate, dtype))) : splat8(0);
    for (long i = 0; i < j->range.width; i += 8) {
        f8 s = j->gate_width == 1 ? one : sigmoid8(load8(j->gate, gate + i, dtype));
        store8(j->out, at + i, load8(j->x, at + i, dtype) * rounded8(s, dtype), dtype);
    }
}

static void sigmoid_task(const void *job, long index)
{
    const gated_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, sigmoid_row, j, row);
}

/* x [rows, width] *= sigmoid(gate), in place; gate [rows, width] or [rows, 1]. */
void surestep_mul_sigmoid(void *x, const void *gate, long rows, long width, long gate_width,
                          long gate_stride, int dtype)
{
    assert(width % 8 == 0);
    gated_job j = {.range = make_range(rows, width, dtype), .out = x, .x = x, .gate = gate,
                   .x_stride = width, .gate_stride = gate_stride, .gate_width = gate_width};
    run_rows(sigmoid_task, &j, &j.range);
}

/* ---- route ---- */

typedef struct {
    const float *logits;
    float *weights;
    int64_t *experts;
    long num_experts, top_k;
    int normalize;
} route_job;

static void route_task(const void *job, long row)
{
    const route_job *j = job;
    const float *z = j->logits + row * j->num_experts;
    float *weights = j->weights + row * j->top_k;
    int64_t *experts = j->experts + row * j->top_k;
    float peak = z[0], mass = 0, chosen = 0;
    for (long e = 1; e < j->num_experts; e++) peak = z[e] > peak ? z[e] : peak;
    for (long e = 0; e < j->num_experts; e++) mass += expf(z[e] - peak);
    for (long n = 0; n < j->top_k; n++) { /* the lowest index wins a tie */
        long best = -1;
        for (long e = 0; e < j->num_experts; e++) {
            int taken = 0;
            for (long i = 0; i < n; i++) taken |= experts[i] == e;
            if (!taken && (best < 0 || z[e] > z[best])) best = e;
        }
        experts[n] = best;
        weights[n] = expf(z[best] - peak) / mass;
        chosen += weights[n];
    }
    for (long n = 0; j->normalize && n < j->top_k; n++) weights[n] /= chosen;
}

/* logits [rows, num_experts] -> the top_k of their softmax, greatest first. */
void surestep_route(float *weights, int64_t *experts, const float *logits, long rows,
                    long num_experts, long top_k, int normalize)
{
    route_job j = {logits, weights, experts, num_experts, top_k, normalize};
    parallel_for(route_task, &j, rows);
}
