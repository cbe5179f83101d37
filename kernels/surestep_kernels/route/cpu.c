/* The experts of tokens, by softmax or by sigmoid. */
#include <assert.h>

#include "pool.h"
#include "vec.h"

/* ---- route ---- */

typedef struct {
    const float *logits;
    float *weights;
    int64_t *experts;
    long num_experts, top_k;
    int normalize;
} route_job;

static void route_task(const void *job, long row)
{
    const route_job *j = job;
    const float *z = j->logits + row * j->num_experts;
    float *weights = j->weights + row * j->top_k;
    int64_t *experts = j->experts + row * j->top_k;
    float peak = z[0], mass = 0, chosen = 0;
    for (long e = 1; e < j->num_experts; e++) peak = z[e] > peak ? z[e] : peak;
    for (long e = 0; e < j->num_experts; e++) mass += expf(z[e] - peak);
    for (long n = 0; n < j->top_k; n++) { /* the lowest index wins a tie */
        long best = -1;
        for (long e = 0; e < j->num_experts; e++) {
            int taken = 0;
            for (long i = 0; i < n; i++) taken |= experts[i] == e;
            if (!taken && (best < 0 || z[e] > z[best])) best = e;
        }
        experts[n] = best;
        weights[n] = expf(z[best] - peak) / mass;
        chosen += weights[n];
    }
    for (long n = 0; j->normalize && n < j->top_k; n++) weights[n] /= chosen;
}

/* logits [rows, num_experts] -> the top_k of their softmax, greatest first. */
void surestep_route(float *weights, int64_t *experts, const float *logits, long rows,
                    long num_experts, long top_k, int normalize)
{
    route_job j = {logits, weights, experts, num_experts, top_k, normalize};
    parallel_for(route_task, &j, rows);
}

/* ---- route_sigmoid ---- */

enum { MAX_EXPERTS = 4096 };

typedef struct {
    const float *logits, *bias;
    float *weights;
    int64_t *experts;
    long num_experts, groups, kept, top_k;
    int normalize;
    float scale;
} sigmoid_job;

/* The greatest of n numbers that is not taken, the lowest index of equal ones; it is taken then. */
static long take_greatest(const float *x, char *taken, long n)
{
    long best = -1;
    for (long i = 0; i < n; i++) if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = 1;
    return best;
}

/* The experts of all groups but the best `kept` are taken; a group is as good as its best two. */
static void limit_groups(const sigmoid_job *j, const float *biased, char *taken)
{
    const long size = j->num_experts / j->groups;
    float sums[MAX_EXPERTS];
    char chosen[MAX_EXPERTS] = {0};
    for (long g = 0; g < j->groups; g++) {
        char used[MAX_EXPERTS] = {0};
        const float *own = biased + g * size;
        const float first = own[take_greatest(own, used, size)];
        sums[g] = first + own[take_greatest(own, used, size)];
    }
    for (long n = 0; n < j->kept; n++) take_greatest(sums, chosen, j->groups);
    for (long e = 0; e < j->num_experts; e++) taken[e] = !chosen[e / size];
}

static void sigmoid_task_of_row(const void *job, long row)
{
    const sigmoid_job *j = job;
    const float *z = j->logits + row * j->num_experts;
    float *weights = j->weights + row * j->top_k, total = 0;
    float scores[MAX_EXPERTS + 8], biased[MAX_EXPERTS];
    char taken[MAX_EXPERTS] = {0};
    for (long e = 0; e < j->num_experts; e += 8) {
        f8 x = splat8(0);
        for (long i = e; i < e + 8 && i < j->num_experts; i++) x[i - e] = z[i];
        store8(scores, e, sigmoid8(x), F32);
    }
    int spoilt = 0;
    for (long e = 0; e < j->num_experts; e++) {
        biased[e] = scores[e] + j->bias[e];
        spoilt |= scores[e] != scores[e];
    }
    if (j->groups > 1) limit_groups(j, biased, taken);
    for (long n = 0; n < j->top_k; n++) {
        const long best = take_greatest(biased, taken, j->num_experts);
        j->experts[row * j->top_k + n] = best;
        weights[n] = scores[best];
        total += weights[n];
    }
    for (long n = 0; n < j->top_k; n++)
        weights[n] = spoilt ? NAN : (j->normalize ? weights[n] / (total + 1e-20f) : weights[n]) * j->scale;
}

/* logits [rows, num_experts] -> weights and experts [rows, top_k]: see route/reference.py. */
void surestep_route_sigmoid(float *weights, int64_t *experts, const float *logits, const float *bias,
                            long rows, long num_experts, long groups, long kept, long top_k,
                            int normalize, float scale)
{
    assert(num_experts <= MAX_EXPERTS && (groups == 1 || num_experts / groups > 1));
    sigmoid_job j = {logits, bias, weights, experts, num_experts, groups, kept, top_k, normalize,
                     scale};
    parallel_for(sigmoid_task_of_row, &j, rows);
}
