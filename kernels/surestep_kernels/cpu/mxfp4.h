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

/* 2^(e - 127) of the bytes e of half a panel; that of 0 is subnormal. */
INLINE vf e8m0(const char *bytes, int half)
{
    vb exponents;
    memcpy(&exponents, bytes + half * (long)sizeof exponents, sizeof exponents);
    vu wide = __builtin_convertvector(exponents, vu);
    return (vf)(wide << 23 | ((vu)(wide == 0) & 1u << 22));
}
