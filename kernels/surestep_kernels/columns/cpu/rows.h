/* Ops that treat each row alone: how rows are divided among the threads. */
#pragma once

#include "pool.h"
#include "vec.h"

/* Threads take rows in groups of about this many elements. */
static const long GROUP_ELEMENTS = 16384;

typedef struct {
    long rows, rows_per_task, width;
    int dtype;
} row_range;

INLINE row_range make_range(long rows, long width, int dtype)
{
    long per_task = GROUP_ELEMENTS / width;
    return (row_range){rows, per_task < 1 ? 1 : per_task, width, dtype};
}

static void run_rows(task_fn task, const void *job, const row_range *range)
{
    parallel_for(task, job, (range->rows + range->rows_per_task - 1) / range->rows_per_task);
}

#define FOR_ROWS(row, range, task_index) \
    for (long row = (task_index) * (range).rows_per_task, \
              end_##row = row + (range).rows_per_task < (range).rows \
                              ? row + (range).rows_per_task : (range).rows; \
         row < end_##row; row++)

/* Call f(..., F32) or f(..., BF16), each inlined. */
#define BY_DTYPE(dtype, f, ...) \
    do { \
        if ((dtype) == BF16) f(__VA_ARGS__, BF16); \
        else f(__VA_ARGS__, F32); \
    } while (0)
