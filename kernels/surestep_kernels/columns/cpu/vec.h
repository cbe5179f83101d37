/* Vectors, the two element types, and the functions of them that the ops share.
 *
 * Everything is written with the vector extensions of GCC and Clang, so that one source serves
 * every machine. Arithmetic is in fp32; bf16 is widened on load and rounded on store.
 *
 * Multiply-adds are fused where fma8() says so and nowhere else (-ffp-contract=off): left to the
 * compiler, two copies of one loop may round differently.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Element types as the Python side numbers them. Functions that take one as `const int dtype`
 * are inlined with a constant: one body, compiled once per type. */
enum { F32 = 0, BF16 = 1, E4M3 = 2, I8 = 3 }; /* E4M3, I8: pages of a cache only */

/* Row-wise ops and attention use 8 lanes on every machine: their results are then the same on
 * machines with wider vectors. */
typedef float f8 __attribute__((vector_size(32)));
typedef uint32_t u8x __attribute__((vector_size(32)));
typedef int32_t i8x __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b8 __attribute__((vector_size(8)));
typedef int8_t s8 __attribute__((vector_size(8)));

INLINE f8 splat8(float x) { return (f8){x, x, x, x, x, x, x, x}; }

/* a * b + c, rounded once. */
INLINE f8 fma8(f8 a, f8 b, f8 c)
{
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    f8 sum;
    for (int i = 0; i < 8; i++) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#else
    return a * b + c;
#endif
}

INLINE long element_size(const int dtype) { return dtype >= E4M3 ? 1 : dtype == BF16 ? 2 : 4; }

INLINE const void *element(const void *base, long index, const int dtype)
{
    return (const char *)base + index * element_size(dtype);
}

/* bf16 to fp32. */
INLINE f8 widen8(h8 narrow)
{
#if defined(__AVX2__)
    return (f8)((u8x)_mm256_cvtepu16_epi32((__m128i)narrow) << 16);
#else
    return (f8)(__builtin_convertvector(narrow, u8x) << 16);
#endif
}

/* 2^-8 of 8 numbers in E4M3, NaN included. */
INLINE f8 decode8(const void *codes)
{
    b8 narrow;
    memcpy(&narrow, codes, sizeof narrow);
    h8 half = (__builtin_convertvector(narrow, h8) << 7 & 0x3f80); /* exponent and mantissa in fp16 */
    half |= (h8)(half == 0x3f80) & 0x7e00;
    half |= __builtin_convertvector(narrow, h8) << 8 & 0x8000;
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps((__m128i)half);
#else /* where fp32 has exponent and mantissa they are 2^-112 of it, subnormals included */
    u8x bits = __builtin_convertvector(half, u8x), size = (bits & 0x7fff) << 13;
    f8 wide = (f8)size * 0x1p112f;
    u8x nan = (u8x)(size >= 0x0f800000) & 0x7fc00000;
    return (f8)((u8x)wide | nan | (bits & 0x8000) << 16);
#endif
}

/* Of E4M3 2^-8 of the numbers, of I8 the codes. */
INLINE f8 load8(const void *base, long index, const int dtype)
{
    f8 wide;
    if (dtype == E4M3) return decode8(element(base, index, dtype));
    if (dtype == I8) {
        s8 codes;
        memcpy(&codes, element(base, index, dtype), sizeof codes);
        return __builtin_convertvector(__builtin_convertvector(codes, i8x), f8);
    }
    if (dtype == BF16) {
        h8 narrow;
        memcpy(&narrow, element(base, index, dtype), sizeof narrow);
        return widen8(narrow);
    }
    memcpy(&wide, element(base, index, dtype), sizeof wide);
    return wide;
}

INLINE float load1(const void *base, long index, const int dtype)
{
    if (dtype == F32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* bf16 bits of x: round to nearest even, NaN stays NaN. */
INLINE uint16_t round1(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store1(void *base, long index, float x, const int dtype)
{
    if (dtype == BF16) ((uint16_t *)base)[index] = round1(x);
    else ((float *)base)[index] = x;
}

/* The same for 8 lanes; the bits lie in the lower halves. */
INLINE u8x round8(f8 x)
{
#if defined(__AVX512VL__) /* a mask instead of vectors of ones */
    const __m256i wide = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd);
    const __mmask8 nan = _mm256_cmp_ps_mask((__m256)x, (__m256)x, _CMP_UNORD_Q);
    return (u8x)_mm256_mask_mov_epi32(_mm256_srli_epi32(sum, 16), nan, _mm256_set1_epi32(0x7fc0));
#else
    u8x bits = (u8x)x, nan = (u8x)(x != x);
    u8x rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (rounded & ~nan) | (nan & 0x7fc0);
#endif
}

INLINE void store8(void *base, long index, f8 x, const int dtype)
{
    if (dtype == BF16) {
        h8 narrow = __builtin_convertvector(round8(x), h8);
        memcpy((char *)base + index * 2, &narrow, sizeof narrow);
    } else {
        memcpy((char *)base + index * 4, &x, sizeof x);
    }
}

/* x rounded to the element type, still wide. */
INLINE f8 rounded8(f8 x, const int dtype)
{
    if (dtype == F32) return x;
    return (f8)(round8(x) << 16);
}

/* E4M3 in the lowest bytes: to nearest, halves to even, saturating; NaN stays NaN. */
INLINE u8x encode8(f8 x)
{
    u8x size = (u8x)x & 0x7fffffff, nan = (u8x)(x != x), over = (u8x)(size > 0x43e00000);
    size = (size & ~over) | (over & 0x43e00000); /* 448 */
    u8x normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
    /* What is less than 2^-6 counts in 2^-9, the distance of numbers from 2^14 on. */
    u8x small = (u8x)((f8)size + 16384.0f) - 0x46800000, is_small = (u8x)(size < 0x3c800000);
    u8x code = (small & is_small) | (normal & ~is_small);
    return (code & ~nan) | (nan & 0x7f) | ((u8x)x >> 24 & 0x80);
}

INLINE f8 select8(i8x mask, f8 yes, f8 no)
{
    return (f8)(((i8x)yes & mask) | ((i8x)no & ~mask));
}

INLINE f8 max8(f8 a, f8 b) { return select8(a > b, a, b); }

INLINE float sum_lanes(f8 x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

INLINE float max_lanes(f8 x)
{
    float m = x[0];
    for (int i = 1; i < 8; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x by Cephes' expf, of which vectors of any width have the same bits: x = n ln 2 + r. */
#define EXP_REMAINDER(x, n, fma, splat) \
    fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x))
#define EXP_OF_REMAINDER(r, fma, splat) \
    (fma(fma(fma(fma(fma(fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f)), \
                         r, splat(8.3334519073e-3f)), \
                     r, splat(4.1665795894e-2f)), \
                 r, splat(1.6666665459e-1f)), \
             r, splat(5.0000001201e-1f)), \
         r * r, r) + 1.0f)

/* e^x to about 1 ulp (range reduction by ln 2 in two parts, then the Cephes polynomial).
 * 0 below -87, NaN for NaN; x above 88 counts as 88. */
INLINE f8 exp8(f8 x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    f8 clamped = select8(x > 88.0f, splat8(88.0f), x);
    f8 shifted = fma8(clamped, splat8(1.44269504f), splat8(magic));
    f8 n = shifted - magic;
    f8 r = EXP_REMAINDER(clamped, n, fma8, splat8), p = EXP_OF_REMAINDER(r, fma8, splat8);
    f8 power = (f8)(((i8x)shifted - 0x4b400000 + 127) << 23); /* 2^n */
    return select8(x < -87.0f, splat8(0), p * power);
}

INLINE f8 silu8(f8 x) { return x / (1.0f + exp8(-x)); }

INLINE f8 sigmoid8(f8 x) { return 1.0f / (1.0f + exp8(-x)); }
