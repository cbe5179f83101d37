/* Chunks where the machine multiplies bytes and adds up four products (VNNI). See digits.c. */
#pragma once

#include "digits_chunk.h"

enum { MAX_OPERANDS = CHUNK / 4, CENTRE = 0x808080 };

INLINE __m512 load_some(const void *x, long at, long count, const int dtype)
{
    const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1 << count) - 1);
    if (dtype == F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + at);
    __m256i narrow = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + at);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
}

INLINE uint32_t largest_of(__m512 a, __m512 b)
{
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_epi32((__m512i)a, sign), _mm512_and_epi32((__m512i)b, sign)));
}

/* Digits of 16 elements: those of a dword of codes side by side, 16 bytes of each digit. */
INLINE __m512i digits_of(__m512 x, float factor, const int nibbles, const int digits)
{
    const __m512i by_parity = {0x200000000, 0x600000004, 0x300000001, 0x700000005,
                               0xa00000008, 0xe0000000c, 0xb00000009, 0xf0000000d};
    const __m512i by_digit = digits == 3
        ? _mm512_set4_epi32(0x80808080, 0x0c080400, 0x0d090501, 0x0e0a0602)
        : _mm512_set4_epi32(0x80808080, 0x80808080, 0x0c080400, 0x0d090501);
    const __m512i together = {0x400000000, 0xc00000008, 0x500000001, 0xd00000009,
                              0x600000002, 0xe0000000a, 0x700000003, 0xf0000000b};
    if (nibbles) x = _mm512_permutexvar_ps(by_parity, x);
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
    const __m512i centre = _mm512_set1_epi32(CENTRE);
    whole = _mm512_xor_si512(_mm512_add_epi32(whole, centre), centre);
    return _mm512_permutexvar_epi32(together, _mm512_shuffle_epi8(whole, by_digit));
}

INLINE void store_digits(char *out, __m512i bytes, long at, long count, const int digits)
{
    const __mmask16 mask = count - at >= 16 ? 0xffff : 0xff; /* counts are multiples of 8 */
    _mm_mask_storeu_epi8(out + at, mask, _mm512_extracti32x4_epi32(bytes, 0));
    _mm_mask_storeu_epi8(out + count + at, mask, _mm512_extracti32x4_epi32(bytes, 1));
    if (digits == 3)
        _mm_mask_storeu_epi8(out + 2 * count + at, mask, _mm512_extracti32x4_epi32(bytes, 2));
}

/* The numbers of a chunk of `count` elements, `there` of which x has from `at` on. */
INLINE chunk_numbers prepare_chunk(char *to, const void *x, long at, long there, long count,
                                   const int nibbles, const int dtype, const int digits)
{
    const int bits = bits_of(digits);
    __m512 a = load_some(x, at, there, dtype), b = load_some(x, at + 16, there - 16, dtype);
    int finite;
    const uint32_t exponent = exponent_of(largest_of(a, b), &finite);
    const float factor = power(254 + bits - exponent);
    store_digits(to, digits_of(a, factor, nibbles, digits), 0, count, digits);
    if (count > 16) store_digits(to, digits_of(b, factor, nibbles, digits), 16, count, digits);
    return (chunk_numbers){finite ? power(exponent - bits) : NAN,
                           _mm512_reduce_add_ps(_mm512_add_ps(a, b))};
}

/* The sum of code * x that `digits` dot products [digits] make: exact but for the rounding to fp32. */
INLINE vf whole_sum(vi sums[3][2], const int half, const int digits)
{
    if (digits == 2) return __builtin_convertvector((sums[0][half] << 8) + sums[1][half], vf);
    const vi lower = (sums[1][half] << 8) + sums[2][half];
    return fma_lanes(__builtin_convertvector(sums[0][half], vf), splat(65536),
                     __builtin_convertvector(lower, vf));
}

INLINE vi dot(vi sum, vi codes, const char *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
}

/* Adds what a chunk of one or two rows of x makes with `operands` dwords of codes of every column.
 * Two rows are twice as many chains of dot products, each of which waits for the one before. */
INLINE void add_rows(vf *sums, vi codes[2][MAX_OPERANDS], const header *h, const char *x,
                     const char *numbers, long stride, const int rows, const int operands,
                     const int digits)
{
    vi dots[2][3][2] = {0};
#pragma GCC unroll 8
    for (int i = 0; i < operands; i++)
#pragma GCC unroll 3
        for (int d = 0; d < digits; d++)
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    vi *sum = &dots[r][d][half];
                    *sum = dot(*sum, codes[half][i], x + r * stride + 4 * (d * operands + i));
                }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            add_sum(sums + 2 * r + half, whole_sum(dots[r], half, digits), h, half,
                    (const chunk_numbers *)(numbers + r * stride));
}

INLINE void add_chunk(const linear_job *j, vf *sums, const char *codes, const header *h,
                      const char *x, const chunk_numbers *numbers, long rows, const int operands,
                      const int kind, const int digits)
{
    vi decoded[2][MAX_OPERANDS];
#pragma GCC unroll 8
    for (int i = 0; i < operands; i++)
        for (int half = 0; half < 2; half++) {
            if (kind == AFFINE8) decoded[half][i] = (vi)load_lanes(codes + i * STRIP, half);
            else decoded[half][i] = (vi)(load_lanes(codes + i / 2 * STRIP, half) >> i % 2 * 4 & 0x0f0f0f0f);
        }
    const char *of = (const char *)numbers;
    const long stride = j->x_stride;
    long r = 0;
    for (; r + 2 <= rows; r += 2, x += 2 * stride, of += 2 * stride)
        add_rows(sums + 2 * r, decoded, h, x, of, stride, 2, operands, digits);
    if (r < rows) add_rows(sums + 2 * r, decoded, h, x, of, stride, 1, operands, digits);
}
