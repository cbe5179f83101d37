#include "ops.h"
#include "rows.h"

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
