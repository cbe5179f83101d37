/* Row-wise ops of gated layers and of routed experts. */
#include <assert.h>

#include "pool.h"
#include "vec.h"

enum { TASK_ROWS = 16 };

typedef struct {
    long rows, width, groups;
    void *out;
    const void *x, *gate;
    const float *weight;
    long x_stride, gate_stride, gate_width;
    float eps;
    int dtype;
} gated_job;

INLINE void for_task_rows(const gated_job *j, long index, long *from, long *to)
{
    *from = index * TASK_ROWS;
    *to = *from + TASK_ROWS < j->rows ? *from + TASK_ROWS : j->rows;
}

static void run_tasks(task_fn task, const gated_job *j)
{
    parallel_for(task, j, (j->rows + TASK_ROWS - 1) / TASK_ROWS);
}

/* ---- rms_norm_gated ---- */

INLINE void norm_group(const gated_job *j, long row, long group, const int dtype)
{
    const long at = (row * j->groups + group) * j->width;
    const long gate = row * j->gate_stride + group * j->width;
    f8 squares = splat8(0);
    for (long i = 0; i < j->width; i += 8) {
        f8 v = load8(j->x, at + i, dtype);
        squares = fma8(v, v, squares);
    }
    float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)j->width + j->eps);
    for (long i = 0; i < j->width; i += 8) {
        f8 v = rounded8(load8(j->x, at + i, dtype) * inverse, dtype) * load8(j->weight, i, F32);
        f8 g = load8(j->gate, gate + i, dtype);
        store8(j->out, at + i, rounded8(v, dtype) * (g / (1.0f + exp8(-g))), dtype);
    }
}

static void norm_task(const void *job, long index)
{
    const gated_job *j = job;
    long row, end;
    for (for_task_rows(j, index, &row, &end); row < end; row++)
        for (long group = 0; group < j->groups; group++) {
            if (j->dtype == BF16) norm_group(j, row, group, BF16);
            else norm_group(j, row, group, F32);
        }
}

/* x [rows, groups, width]: each group normalised, scaled, times silu of its gate. */
void surestep_rms_norm_gated(void *out, const void *x, const void *gate, const float *weight,
                             float eps, long rows, long groups, long width, long gate_stride,
                             int dtype)
{
    assert(width % 8 == 0);
    gated_job j = {.rows = rows, .width = width, .groups = groups, .out = out, .x = x,
                   .gate = gate, .weight = weight, .gate_stride = gate_stride, .eps = eps,
                   .dtype = dtype};
    run_tasks(norm_task, &j);
}

/* ---- mul_sigmoid ---- */

INLINE f8 sigmoid8(f8 x) { return 1.0f / (1.0f + exp8(-x)); }

INLINE void sigmoid_row(const gated_job *j, long row, const int dtype)
{
    const long at = row * j->x_stride, gate = row * j->gate_stride;
    f8 one = j->gate_width == 1 ? sigmoid8(splat8(load1(j->gate, gate, dtype))) : splat8(0);
    for (long i = 0; i < j->width; i += 8) {
        f8 s = j->gate_width == 1 ? one : sigmoid8(load8(j->gate, gate + i, dtype));
        store8(j->out, at + i, load8(j->x, at + i, dtype) * rounded8(s, dtype), dtype);
    }
}

static void sigmoid_task(const void *job, long index)
{
    const gated_job *j = job;
    long row, end;
    for (for_task_rows(j, index, &row, &end); row < end; row++) {
        if (j->dtype == BF16) sigmoid_row(j, row, BF16);
        else sigmoid_row(j, row, F32);
    }
}

/* x [rows, width] *= sigmoid(gate), in place; gate [rows, width] or [rows, 1]. */
void surestep_mul_sigmoid(void *x, const void *gate, long rows, long width, long gate_width,
                          long gate_stride, int dtype)
{
    assert(width % 8 == 0);
    gated_job j = {.rows = rows, .width = width, .out = x, .x = x, .gate = gate,
                   .x_stride = width, .gate_stride = gate_stride, .gate_width = gate_width,
                   .dtype = dtype};
    run_tasks(sigmoid_task, &j);
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
