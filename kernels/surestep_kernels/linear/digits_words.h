/* Chunks where the machine multiplies words and adds up two products (AVX2). See digits.c.
 *
 * A number of x is one word, which has the bits of two digits, and a code is widened to one. There are products
 * of bytes, too, but the sum of two of them may not fit into 16 bits where codes have 8.
 */
#pragma once

#include "digits_chunk.h"

enum { WORD_ROWS = 5 }; /* whose sums and operands the registers hold */

/* Eight elements; zeros behind the `there` that x has from `at` on. */
INLINE f8 load_some(const void *x, long at, long there, const int dtype)
{
    if (there >= 8) return load8(x, at, dtype);
    f8 values = splat8(0);
    for (long i = 0; i < there; i++) values[i] = load1(x, at + i, dtype);
    return values;
}

/* Stores the words of 8 elements: those of two codes of a dword side by side. */
INLINE void store_words(char *out, f8 x, float factor, const int nibbles)
{
    const __m256i order = nibbles ? _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7) : _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    const __m256i whole = _mm256_cvtps_epi32((__m256)(x * factor));
    const __m256i words = _mm256_permutevar8x32_epi32(whole, order);
    /* of every 128 bits: the words of the low half beside those of the high one */
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    const __m128i pairs = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi32(0xffff)), _mm_slli_epi32(high, 16));
    memcpy(out, &pairs, sizeof pairs);
}

/* The numbers of a chunk of `count` elements, `there` of which x has from `at` on. */
INLINE chunk_numbers prepare_chunk(char *to, const void *x, long at, long there, long count,
                                   const int nibbles, const int dtype, const int digits)
{
    const int bits = bits_of(digits);
    f8 values[CHUNK / 8], sum = splat8(0);
    __m256i most = _mm256_setzero_si256();
    for (long i = 0; i < count / 8; i++) {
        values[i] = load_some(x, at + 8 * i, there - 8 * i, dtype);
        most = _mm256_max_epu32(most, (__m256i)((u8x)values[i] & 0x7fffffff));
        sum += values[i];
    }
    uint32_t largest = 0;
    for (int i = 0; i < 8; i++) largest = ((u8x)most)[i] > largest ? ((u8x)most)[i] : largest;
    int finite;
    const uint32_t exponent = exponent_of(largest, &finite);
    const float factor = power(254 + bits - exponent);
    for (long i = 0; i < count / 8; i++) store_words(to + 16 * i, values[i], factor, nibbles);
    return (chunk_numbers){finite ? power(exponent - bits) : NAN, sum_lanes(sum)};
}

/* Four codes of every column of half a panel; of MXFP4 twice the numbers, signed. */
INLINE vu decode(const char *codes, int half, int i, const int kind)
{
    if (kind == AFFINE8) return load_lanes(codes + i * STRIP, half);
    vu nibbles = load_lanes(codes + i / 2 * STRIP, half) >> i % 2 * 4 & 0x0f0f0f0f;
    if (kind == INT4) return nibbles;
    const __m256i numbers = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    return (vu)_mm256_shuffle_epi8(numbers, (__m256i)nibbles);
}

/* The first and third of four codes as words, or the second and fourth. */
INLINE vu two_of(vu four, const int which, const int kind)
{
    if (kind != MXFP4) return four >> which * 8 & 0x00ff00ff;
    const __m256i at_the_top = which ? (__m256i)four : _mm256_slli_epi16((__m256i)four, 8);
    return (vu)_mm256_srai_epi16(at_the_top, 8);
}

/* The compiler computes these now: it would keep so many others that they do not fit. */
#define NOW(a, b) __asm__ volatile("" : "+x"(a), "+x"(b))

/* Adds what a chunk of a few rows of x makes with `operands` fours of codes of every column. */
INLINE void add_rows(vf *sums, const char *codes, const header *h, const char *x,
                     const char *numbers, long stride, const int rows, const int operands,
                     const int kind)
{
    vi dots[WORD_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) dots[r][0] = dots[r][1] = (vi){0};
#pragma GCC unroll 8
    for (int i = 0; i < operands; i++) {
        vu first = decode(codes, 0, i, kind), second = decode(codes, 1, i, kind);
        NOW(first, second);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            vu a = two_of(first, pair, kind), b = two_of(second, pair, kind);
            NOW(a, b);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t two;
                memcpy(&two, x + r * stride + 8 * i + 4 * pair, sizeof two);
                const __m256i with = _mm256_set1_epi32(two);
                dots[r][0] += (vi)_mm256_madd_epi16((__m256i)a, with);
                dots[r][1] += (vi)_mm256_madd_epi16((__m256i)b, with);
                NOW(dots[r][0], dots[r][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            add_sum(sums + 2 * r + half, __builtin_convertvector(dots[r][half], vf), h, half,
                    (const chunk_numbers *)(numbers + r * stride));
}

#define ADD_ROWS(n) \
    case n: add_rows(sums + 2 * r, codes, h, x, of, stride, n, operands, kind); break;

INLINE void add_chunk(const linear_job *j, vf *sums, const char *codes, const header *h,
                      const char *x, const chunk_numbers *numbers, long rows, const int operands,
                      const int kind, const int digits)
{
    const char *of = (const char *)numbers;
    const long stride = j->x_stride;
    /* Groups of 8 or 24 are rare: less code. */
    const long most = operands % 4 ? 1 : WORD_ROWS;
    for (long r = 0, some; r < rows; r += some, x += some * stride, of += some * stride) {
        some = rows - r < most ? rows - r : most;
        if (operands % 4) add_rows(sums + 2 * r, codes, h, x, of, stride, 1, operands, kind);
        else switch (some) {
            ADD_ROWS(1) ADD_ROWS(2) ADD_ROWS(3) ADD_ROWS(4) ADD_ROWS(5)
        }
    }
    (void)digits; /* two, in a word */
}
