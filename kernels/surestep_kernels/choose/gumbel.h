/* The counter-based noise of surestep_kernels/choose/gumbel.py, and a cheap bound of it.
 *
 * The noise of a token is G = -log(-log V) of a hash. Two logarithms in double precision are
 * expensive, and hardly any token needs them: with 1 - V = (U - 1/2) / 2^32 for the whole number
 * U = 2^31 - h,
 *
 *     G <= -log(1 - V),  so  G >= needed  only if  U - 1/2 <= 2^(32 - needed / ln 2)
 *
 * The hash is computed for every token, the noise only for those that pass the bound.
 */
#pragma once

#include "vec.h"

typedef struct {
    uint32_t low, high;
} noise_key;

static const float MOST_NOISE = 22.9f; /* 33 ln 2 = 22.874, of V = 1 - 2^-33 */
static const float LOG2_E = 1.44269504f;

INLINE uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

INLINE noise_key key_of(uint32_t seed_low, uint32_t seed_high, int32_t position)
{
    uint64_t seed = (uint64_t)seed_high << 32 | seed_low;
    uint64_t key = mix64(mix64(seed + 0x5375726553746570u)
                         + (uint64_t)(int64_t)position * 0x9E3779B97F4A7C15u);
    return (noise_key){(uint32_t)key, (uint32_t)(key >> 32)};
}

/* Hashes of 8 token ids. */
INLINE i8x hash8(i8x ids, noise_key key)
{
    u8x x = (u8x)ids + 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x = x ^ (x >> 16) ^ key.low;
    x = ((x ^ (x >> 16)) * 0x7FEB352Du) ^ key.high;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return (i8x)(x ^ (x >> 16));
}

/* The noise that belongs to a hash. */
INLINE float noise_of(int32_t hash)
{
    return (float)-log(-log(((double)hash + 2147483648.5) * 0x1p-32));
}

/* Which hashes may have noise that lifts -gap to `best` or more; too many, never too few.
 *
 * 2^y is taken from the line above it between two powers of 2, which costs one conversion. Hashes
 * are compared as floats, which are right to 64 here: hence the margin of 256, which matters to
 * one hash of 2^24. The 0.001 is far more than all other rounding errors. */
INLINE i8x may_reach8(i8x hash, f8 gap, float best)
{
    f8 y = (32.001f - best * LOG2_E) - gap * LOG2_E;
    y = select8(y < 33.0f, y, splat8(33.0f)); /* NaN: nothing was drawn yet */
    y = select8(y > 0.0f, y, splat8(0));
    f8 power = (f8)__builtin_convertvector((y + 127.0f) * 8388608.0f, i8x);
    return __builtin_convertvector(hash, f8) >= (2147483648.0f - 256.0f) - power;
}
