#include "ops.h"
#include "rows.h"

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
