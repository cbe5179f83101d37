#include "gated.h"

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
