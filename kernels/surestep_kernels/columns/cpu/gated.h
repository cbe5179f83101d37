/* Rows that are multiplied by a function of their gates. */
#pragma once

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
