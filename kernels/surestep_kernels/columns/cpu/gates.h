/* Activations that multiply the second half of a row by a function of its first half. */
#pragma once

#include "halves.h"
#include "rows.h"

enum { SILU, GELU, CLAMPED };

typedef struct {
    row_range range;
    void *out;
    const void *x;
    int activation;
    float limit; /* of CLAMPED */
} gate_job;

/* x (1 + tanh(u)) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf gelu_lanes(vf x)
{
    const vf twice = x * fma_lanes(x * x, splat(0.0713548163f), splat(1.59576912f));
    return x / (1.0f + exp_any(-twice));
}

INLINE vf gate_lanes(const gate_job *j, vf gate, vf up, const int dtype)
{
    if (j->activation != CLAMPED) {
        const vf active = j->activation == GELU ? gelu_lanes(gate) : gate / (1.0f + exp_any(-gate));
        return (dtype == BF16 ? (vf)(round_lanes(active) << 16) : active) * up;
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
