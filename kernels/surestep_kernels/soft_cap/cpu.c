#include "halves.h"
#include "rows.h"

typedef struct {
    float *x;
    long count;
    float cap;
} cap_job;

static void cap_task(const void *job, long index)
{
    const cap_job *j = job;
    const long begin = index * GROUP_ELEMENTS, left = j->count - begin;
    const long end = begin + (left < GROUP_ELEMENTS ? left : GROUP_ELEMENTS);
    long i = begin;
    for (; i + LANES <= end; i += LANES) {
        const vf capped = cap_lanes(load_f32(j->x + i), j->cap);
        memcpy(j->x + i, &capped, sizeof capped);
    }
    for (; i < end; i++) j->x[i] = cap_lanes(splat(j->x[i]), j->cap)[0];
}

/* x [count] -> cap * tanh(x / cap), in place. */
void surestep_soft_cap(float *x, long count, float cap)
{
    const cap_job j = {x, count, cap};
    parallel_for(cap_task, &j, (count + GROUP_ELEMENTS - 1) / GROUP_ELEMENTS);
}
