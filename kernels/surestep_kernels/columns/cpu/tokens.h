/* Tokens that may be drawn, and their order: the smallest gap first, then the lowest id.
 *
 * The gap of a token is (greatest logit - logit) / temperature, one rounded division, as in
 * surestep_kernels/choose/reference.py. Every rule keeps a leading part of the order: the tokens in
 * front of some place.
 */
#pragma once

#include "vec.h"

typedef struct {
    const float *z;     /* [n] logits; -inf is never drawn */
    const int32_t *ids; /* [n]; NULL: the index */
    long n;             /* with ids, a multiple of 8 */
    float peak;         /* greatest logit, not -0 */
    float temperature;
} tokens;

typedef struct {
    float gap;
    int32_t id;
} place;

enum { BLOCK = 32 }; /* tokens that are skipped together */

INLINE int any8(i8x mask)
{
#if defined(__AVX__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    typedef int64_t l4 __attribute__((vector_size(32)));
    l4 x = (l4)mask;
    return (x[0] | x[1] | x[2] | x[3]) != 0;
#endif
}

INLINE f8 logits8(const tokens *t, long i)
{
    if (i + 8 <= t->n) return load8(t->z, i, F32);
    f8 z = splat8(-INFINITY);
    for (long lane = 0; lane < t->n - i; lane++) z[lane] = t->z[i + lane];
    return z;
}

INLINE i8x ids8(const tokens *t, long i)
{
    i8x ids = {0, 1, 2, 3, 4, 5, 6, 7};
    if (!t->ids) return ids + (int32_t)i;
    memcpy(&ids, t->ids + i, sizeof ids);
    return ids;
}

INLINE f8 gap8(const tokens *t, long i) { return (t->peak - logits8(t, i)) / t->temperature; }

/* Which tokens are in front of `end`. */
INLINE i8x in_front8(f8 gap, i8x ids, place end)
{
    return (gap < end.gap) | ((gap == end.gap) & (ids < end.id));
}

INLINE int in_front(place a, place end)
{
    return a.gap < end.gap || (a.gap == end.gap && a.id < end.id);
}

/* A distance from the peak beyond which gaps are greater than this, rounded as they are. */
INLINE float distance_of(const tokens *t, float gap)
{
    const double next = nextafterf(gap, INFINITY);
    return nextafterf((float)(next * (double)t->temperature), INFINITY);
}

/* Whether some token from i on, up to the block's end, may be within a distance. */
INLINE int block_reaches(const tokens *t, long i, float distance)
{
    if (i + BLOCK > t->n) return 1;
    f8 a = max8(load8(t->z, i, F32), load8(t->z, i + 8, F32));
    f8 b = max8(load8(t->z, i + 16, F32), load8(t->z, i + 24, F32));
    return any8(t->peak - max8(a, b) <= distance);
}

/* Indices of vectors of 8 tokens in those blocks that may reach as far as `distance`, which may
 * shrink on the way. */
#define FOR_NEAR(i, t, distance) \
    for (long block_##i = 0; block_##i < (t)->n; block_##i += BLOCK) \
        if (block_reaches(t, block_##i, distance)) \
            for (long i = block_##i; i < block_##i + BLOCK && i < (t)->n; i += 8)
