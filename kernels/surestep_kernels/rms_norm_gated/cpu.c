#include "gated.h"

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
