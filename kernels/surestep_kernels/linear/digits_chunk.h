/* What products of bytes and of words share: the numbers of a chunk. See digits.c. */
#pragma once

#include "digits.h"
#include "quantized_header.h"

enum { CHUNK = 32 };

typedef struct {
    float unit; /* what 1 in the digits stands for; NaN if an element is not finite */
    float sum;  /* of the elements */
} chunk_numbers;

/* Bits of the whole numbers, without the sign. */
INLINE int bits_of(const int digits) { return 8 * digits - 2; }

/* The exponent, as fp32 has it, of a number that no element is 1.98 times. */
INLINE uint32_t exponent_of(uint32_t largest, int *finite)
{
    const uint32_t exponent = (largest + 0x20000) >> 23;
    *finite = largest < 0x7f800000;
    return exponent < 24 ? 24 : exponent;
}

INLINE float power(uint32_t exponent)
{
    uint32_t bits = exponent << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Adds what a chunk makes to half a panel of a row. */
INLINE void add_sum(vf *sum, vf whole, const header *h, const int half, const chunk_numbers *of)
{
    vf scaled = fma_lanes(whole * splat(of->unit), h->scale[half], *sum);
    *sum = fma_lanes(h->min[half], splat(of->sum), scaled);
}
