#include "gates.h"

/* x [rows, 2 * width] -> out [rows, width]; limit > 0. */
void surestep_clamped_swiglu(void *out, const void *x, float limit, long rows, long width,
                             int dtype)
{
    gate_job j = {make_range(rows, width, dtype), out, x, CLAMPED, limit};
    run_rows(gate_task, &j, &j.range);
}
