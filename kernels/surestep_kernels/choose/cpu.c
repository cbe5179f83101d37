/* From logits to one token per position: see surestep_kernels/choose/reference.py. */
#include <stdatomic.h>

#include "draw.h"
#include "pool.h"

enum { OK = 1, NON_FINITE = 2, NO_CANDIDATE = 3, SHAPING_OVERFLOW = 4 }; /* RowStatus */
static const float SATURATED = 3.40282346638528859812e38f;

typedef struct { /* of each window: DrawParams, in its order */
    const float *temperature;
    const int32_t *seed_low, *seed_high;
    const float *max_gap;
    const int32_t *top_k;
    const float *top_p;
} draw_params;

typedef struct {
    int32_t *ids, *status; /* [rows] */
    const float *z;        /* [rows, width] */
    const int32_t *window, *length;
    long width;
    int random, truncated;
    const draw_params *params;
    _Atomic int *failed;
} choose_job;

typedef struct {
    float value; /* NaN if any logit is */
    int32_t id;  /* the first one that is as great */
} peak;

/* One pass: a block is read again only if it has a greater logit than all before. */
static peak peak_of(const tokens *t)
{
    peak best = {-INFINITY, 0};
    i8x nan = {0};
    long block = 0;
    for (long i = 0; i < t->n; i += BLOCK) {
        f8 greatest = splat8(-INFINITY);
        for (long j = i; j < i + BLOCK && j < t->n; j += 8) {
            f8 z = logits8(t, j);
            nan |= z != z;
            greatest = max8(z, greatest);
        }
        if (!any8(greatest > best.value)) continue;
        best.value = max_lanes(greatest);
        block = i;
    }
    if (any8(nan)) return (peak){NAN, 0};
    if (t->n) for (; t->z[block] != best.value; block++) {}
    best.id = (int32_t)block;
    return best;
}

static int32_t status_of(float peak)
{
    if (peak == SATURATED) return SHAPING_OVERFLOW;
    if (peak == -INFINITY) return NO_CANDIDATE;
    return isfinite(peak) ? OK : NON_FINITE;
}

static int32_t draw_row(const choose_job *j, long row, const tokens *t, int32_t greedy)
{
    const draw_params *p = j->params;
    const long w = j->window[row];
    const restriction r = {p->max_gap[w], p->top_k[w], p->top_p[w]};
    const noise_key key = key_of((uint32_t)p->seed_low[w], (uint32_t)p->seed_high[w],
                                 j->length[row]);
    int32_t id = draw_token(t, greedy, key, j->truncated ? &r : NULL);
    if (id < 0) atomic_store(j->failed, 1);
    return id;
}

static void choose_task(const void *job, long row)
{
    const choose_job *j = job;
    tokens t = {j->z + row * j->width, NULL, j->width, 0, 0};
    const peak best = peak_of(&t);
    const int32_t status = status_of(best.value);
    int32_t id = status == OK ? best.id : 0;
    if (j->random) t.temperature = j->params->temperature[j->window[row]];
    if (status == OK && t.temperature > 0) {
        t.peak = best.value + 0.0f; /* turns -0 into 0: the bits of gaps are compared */
        id = draw_row(j, row, &t, id);
    }
    j->status[row] = status;
    j->ids[row] = id;
}

/* Choose for each row of z [rows, width]; 0 when there was no memory. */
int surestep_choose(int32_t *ids, int32_t *status, const float *z, const int32_t *window,
                    const int32_t *length, const draw_params *params, long rows, long width,
                    int random, int truncated)
{
    _Atomic int failed = 0;
    choose_job j = {ids, status, z, window, length, width, random, truncated, params, &failed};
    parallel_for(choose_task, &j, rows);
    return !atomic_load(&failed);
}
