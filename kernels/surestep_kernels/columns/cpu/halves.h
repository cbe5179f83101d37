/* Vectors as wide as the machine has them, from halves that may lie apart. */
#pragma once

#include "linear.h"

INLINE vf load_f32(const float *from)
{
    vf lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE vf e4m3_halves(const void *a, const void *b)
{
    const __m128i codes = _mm_unpacklo_epi64(_mm_loadl_epi64(a), _mm_loadl_epi64(b));
    /* Sign, exponent and mantissa where fp16 has them; the sign is in every bit above. */
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    half = _mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff));
    const __m256i nan = _mm256_set1_epi16(0x3f80);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, nan), nan);
    half = _mm256_or_si256(half, _mm256_maskz_set1_epi16(is_nan, 0x7e00));
    return (vf)_mm512_cvtph_ps(half);
}

INLINE vf i8_halves(const void *a, const void *b)
{
    const __m128i codes = _mm_unpacklo_epi64(_mm_loadl_epi64(a), _mm_loadl_epi64(b));
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}

INLINE vf bf16_halves(const void *a, const void *b)
{
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(a));
    const __m256i both = _mm256_inserti128_si256(low, _mm_loadu_si128(b), 1);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16);
}
#endif

/* Eight elements from a on, as load8 has them, and where a vector has more lanes eight from b on. */
INLINE vf load_halves(const void *base, long a, long b, const int dtype)
{
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if (dtype == E4M3) return e4m3_halves(element(base, a, dtype), element(base, b, dtype));
    if (dtype == I8) return i8_halves(element(base, a, dtype), element(base, b, dtype));
    if (dtype == BF16) return bf16_halves(element(base, a, dtype), element(base, b, dtype));
#endif
#if defined(__AVX512F__)
    const __m512 low = _mm512_castps256_ps512((__m256)load8(base, a, dtype));
    return (vf)_mm512_insertf32x8(low, (__m256)load8(base, b, dtype), 1);
#else
    (void)b;
    return load8(base, a, dtype);
#endif
}

INLINE vf greater_lanes(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return max8(a, b);
#endif
}

INLINE float greatest_lane(vf x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    return max_lanes(x);
#endif
}

/* sum and the eights of x one after the other. */
INLINE f8 add_groups(f8 sum, vf x)
{
#if defined(__AVX512F__)
    sum += (f8)_mm512_castps512_ps256((__m512)x);
    return sum + (f8)_mm512_extractf32x8_ps((__m512)x, 1);
#else
    return sum + x;
#endif
}

/* exp8 of x <= 0 or NaN. */
INLINE vf exp_lanes(vf x)
{
#if defined(__AVX512F__)
    const __m512 magic = _mm512_set1_ps(12582912.0f), small = (__m512)x;
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(small, _mm512_set1_ps(1.44269504f), magic), magic);
    const vf r = EXP_REMAINDER(x, (vf)n, fma_lanes, splat), p = EXP_OF_REMAINDER(r, fma_lanes, splat);
    const __mmask16 seen = _mm512_cmp_ps_mask(small, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
#else
    return exp8(x);
#endif
}

/* exp8. */
INLINE vf exp_any(vf x)
{
#if defined(__AVX512F__)
    return exp_lanes((vf)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x)); /* NaN stays */
#else
    return exp8(x);
#endif
}

INLINE vf sigmoid_lanes(vf x) { return 1.0f / (1.0f + exp_any(-x)); }

INLINE vf select_lanes(vi mask, vf yes, vf no)
{
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

/* tanh(x) to about 1 ulp: Cephes' polynomial near zero, elsewhere 1 - 2 / (e^2|x| + 1). */
INLINE vf tanh_lanes(vf x)
{
    const vf size = (vf)((vu)x & 0x7fffffff), square = x * x;
    vf p = fma_lanes(square, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
    p = fma_lanes(p, square, splat(-5.37397155531e-2f));
    p = fma_lanes(p, square, splat(1.33314422036e-1f));
    p = fma_lanes(p, square, splat(-3.33332819422e-1f));
    const vf far = 1.0f - 2.0f / (exp_any(size + size) + 1.0f);
    const vf made = select_lanes(size < 0.625f, fma_lanes(p * square, size, size), far);
    return (vf)((vu)made | ((vu)x & 0x80000000));
}

/* cap * tanh(x / cap) */
INLINE vf cap_lanes(vf x, float cap) { return tanh_lanes(x / cap) * cap; }
