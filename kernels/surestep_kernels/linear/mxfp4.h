/* The numbers of MXFP4 (OCP Microscaling Formats 1.0): elements in E2M1, scales in E8M0. */
#pragma once

#include "linear.h"

typedef uint8_t vb __attribute__((vector_size(LANES)));

/* The number that nibble i of every lane stands for in E2M1. */
INLINE vf e2m1(vu lanes, int i)
{
#if defined(__AVX512F__)
    const __m512 numbers = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vf)_mm512_permutexvar_ps((__m512i)(lanes >> 4 * i), numbers);
#else
    vu sign = lanes << (28 - 4 * i) & 0x80000000u;
#if defined(__AVX2__)
    const __m256 sizes = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    return (vf)(sign | (vu)_mm256_permutevar8x32_ps(sizes, (__m256i)(lanes >> 4 * i)));
#else /* where fp32 has exponent and mantissa they are 2^-126 of it, subnormals included */
    return (vf)(sign | (lanes >> 4 * i & 7) << 22) * 0x1p126f;
#endif
#endif
}

#if HAS_DOT
/* Nibbles i and i + 4 of every lane, as a pair of bf16; what lies above a nibble in its half is not
 * looked at but for one bit, which the table has for both its values. */
INLINE vf e2m1_pair(vu lanes, int i)
{
    static const uint16_t numbers[32] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
        0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
        0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    __m512i table = _mm512_loadu_si512(numbers);
    return (vf)_mm512_permutexvar_epi16((__m512i)(lanes >> 4 * i), table);
}
#endif

/* 8 bf16 of x in the order in which pairs of codes meet them. */
INLINE void order_for_pairs(uint16_t *x)
{
    const uint16_t from[8] = {x[0], x[4], x[1], x[5], x[2], x[6], x[3], x[7]};
    memcpy(x, from, sizeof from);
}

/* 2^(e - 127) of the bytes e of half a panel; that of 0 is subnormal. */
INLINE vf e8m0(const char *bytes, int half)
{
    vb exponents;
    memcpy(&exponents, bytes + half * (long)sizeof exponents, sizeof exponents);
    vu wide = __builtin_convertvector(exponents, vu);
    return (vf)(wide << 23 | ((vu)(wide == 0) & 1u << 22));
}
