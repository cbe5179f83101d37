/* y = x W^T with codes of 4 or 8 bits, W = code * scale + min, where the machine multiplies bytes.
 *
 * The panels are those of quantized.c. Chunks are of up to 32 elements of k, all of one group.
 * In each, x becomes whole numbers times a power of two that the largest of them decides, of as many
 * bits as its type deserves. fp32: 22 and a sign, so that everything is within 2^-23 of the largest,
 * about what a sum in fp32 loses. bf16: 14 and a sign, exact down to 2^-7 of the largest and within
 * 2^-15 of it, a hundredth of what rounding to bf16 lost. A number is three or two signed digits in
 * base 256, so that as many dot products of bytes give the sum of code * x of a chunk without any
 * further rounding, with half or a third of the instructions that fp32 takes. Scales and mins are
 * applied once per chunk.
 *
 * Every output element is one chain of fused multiply-adds over the chunks, whatever the number of
 * rows: a row of y is bit for bit the same at any of them. A row of x is, chunk after chunk, the
 * digits of its elements, the highest first, and then a pair of fp32 per chunk.
 */
#include "digits.h"

#include "quantized_header.h"

#if HAS_DIGITS

enum { CHUNK = 32, MAX_OPERANDS = CHUNK / 4, CENTRE = 0x808080 };

typedef struct {
    float unit; /* what 1 in the digits stands for; NaN if an element is not finite */
    float sum;  /* of the elements */
} chunk_numbers;

INLINE long chunks_of(long k, long group)
{
    const long last = k % group;
    return k / group * ((group + CHUNK - 1) / CHUNK) + (last + CHUNK - 1) / CHUNK;
}

/* Bits of the whole numbers, without the sign. */
INLINE int bits_of(const int digits) { return 8 * digits - 2; }

long linear_digits_row(long k, long group, int digits)
{
    return digits * k + chunks_of(k, group) * (long)sizeof(chunk_numbers);
}

INLINE __m512 load_some(const void *x, long at, long count, const int dtype)
{
    const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1 << count) - 1);
    if (dtype == F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + at);
    __m256i narrow = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + at);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
}

/* The exponent, as fp32 has it, of which no element is 1.98 times the power of two. */
INLINE uint32_t exponent_of(__m512 a, __m512 b, int *finite)
{
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_max_epu32(_mm512_and_epi32((__m512i)a, sign), _mm512_and_epi32((__m512i)b, sign));
    uint32_t bits = _mm512_reduce_max_epu32(most), exponent = (bits + 0x20000) >> 23;
    *finite = bits < 0x7f800000;
    return exponent < 24 ? 24 : exponent;
}

INLINE float power(uint32_t exponent)
{
    uint32_t bits = exponent << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
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

INLINE void prepare(const linear_job *j, char *out, const void *x, long k, const int nibbles,
                    const int dtype)
{
    const int digits = digits_for(dtype), bits = bits_of(digits);
    chunk_numbers *numbers = (chunk_numbers *)(out + digits * j->k);
    for (long at = 0, count; at < j->k; at += count) {
        const long left = j->group - at % j->group, end = j->k - at;
        count = left < CHUNK ? left : CHUNK;
        if (end < count) count = end;
        const long there = k - at < count ? k - at : count;
        __m512 a = load_some(x, at, there, dtype), b = load_some(x, at + 16, there - 16, dtype);
        int finite;
        const uint32_t exponent = exponent_of(a, b, &finite);
        const float factor = power(254 + bits - exponent);
        char *to = out + digits * at;
        store_digits(to, digits_of(a, factor, nibbles, digits), 0, count, digits);
        if (count > 16) store_digits(to, digits_of(b, factor, nibbles, digits), 16, count, digits);
        numbers->unit = finite ? power(exponent - bits) : NAN;
        numbers++->sum = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
    }
}

void linear_digits_prepare(const linear_job *j, char *out, const void *x, long k, int dtype)
{
    const int nibbles = codes_of(j->format) == INT4;
    if (nibbles && dtype == BF16) prepare(j, out, x, k, 1, BF16);
    else if (nibbles) prepare(j, out, x, k, 1, F32);
    else if (dtype == BF16) prepare(j, out, x, k, 0, BF16);
    else prepare(j, out, x, k, 0, F32);
}

INLINE vi dot(vi sum, vi codes, const char *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
}

/* The sum of code * x that `digits` dot products [digits] make: exact but for the rounding to fp32. */
INLINE vf whole_sum(vi sums[3][2], const int half, const int digits)
{
    if (digits == 2) return __builtin_convertvector((sums[0][half] << 8) + sums[1][half], vf);
    const vi lower = (sums[1][half] << 8) + sums[2][half];
    return fma_lanes(__builtin_convertvector(sums[0][half], vf), splat(65536),
                     __builtin_convertvector(lower, vf));
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
        for (int half = 0; half < 2; half++) {
            const chunk_numbers *of = (const chunk_numbers *)(numbers + r * stride);
            vf *sum = sums + 2 * r + half;
            vf whole = whole_sum(dots[r], half, digits);
            vf scaled = fma_lanes(whole * splat(of->unit), h->scale[half], *sum);
            *sum = fma_lanes(h->min[half], splat(of->sum), scaled);
        }
}

INLINE void add_chunk(const linear_job *j, vf *sums, const char *codes, const header *h,
                      const char *x, const chunk_numbers *numbers, long rows, const int operands,
                      const int nibbles, const int digits)
{
    vi decoded[2][MAX_OPERANDS];
#pragma GCC unroll 8
    for (int i = 0; i < operands; i++)
        for (int half = 0; half < 2; half++) {
            if (!nibbles) decoded[half][i] = (vi)load_lanes(codes + i * STRIP, half);
            else decoded[half][i] = (vi)(load_lanes(codes + i / 2 * STRIP, half) >> i % 2 * 4 & 0x0f0f0f0f);
        }
    const char *of = (const char *)numbers;
    const long stride = j->x_stride;
    long r = 0;
    for (; r + 2 <= rows; r += 2, x += 2 * stride, of += 2 * stride)
        add_rows(sums + 2 * r, decoded, h, x, of, stride, 2, operands, digits);
    if (r < rows) add_rows(sums + 2 * r, decoded, h, x, of, stride, 1, operands, digits);
}

INLINE void prefetch(const char *from, long bytes, int stream)
{
    for (long at = 0; stream && at < bytes; at += 64) __builtin_prefetch(from + at, 0, 0);
    for (long at = 0; !stream && at < bytes; at += 64) __builtin_prefetch(from + at);
}

INLINE void block(const linear_job *j, vf *sums, const char *w, const char *x, long rows,
                  const int nibbles, const int digits)
{
    const chunk_numbers *numbers = (const chunk_numbers *)(x + digits * j->k);
    for (long at = 0; at < j->k;) {
        const long end = at + j->group < j->k ? at + j->group : j->k;
        header h;
        read_header(&h, w, j->format);
        w += header_bytes(j->format);
        for (long count; at < end; at += count) {
            count = end - at < CHUNK ? end - at : CHUNK;
            const long bytes = count / (nibbles ? 8 : 4) * STRIP;
            const char *of = x + digits * at;
            prefetch(w + AHEAD, bytes + STRIP, j->stream);
            switch (count / 8) {
            case 1: add_chunk(j, sums, w, &h, of, numbers, rows, 2, nibbles, digits); break;
            case 2: add_chunk(j, sums, w, &h, of, numbers, rows, 4, nibbles, digits); break;
            case 3: add_chunk(j, sums, w, &h, of, numbers, rows, 6, nibbles, digits); break;
            default: add_chunk(j, sums, w, &h, of, numbers, rows, 8, nibbles, digits);
            }
            w += bytes;
            numbers++;
        }
    }
}

void linear_digits_block(const linear_job *j, long panel, int panels, long first, long last)
{
    vf sums[MAX_BLOCK_TILES * MAX_ROWS * 2];
    const int nibbles = codes_of(j->format) == INT4, three = j->x_format == THREE_DIGITS;
    const long row = tile_start(j, first), rows = tile_start(j, last) - row;
    for (const long end = panel + panels; panel < end; panel++) {
        const char *w = j->w + panel * j->panel_bytes, *x = j->x + row * j->x_stride;
        memset(sums, 0, (size_t)(rows * PANEL * 4));
        if (nibbles && three) block(j, sums, w, x, rows, 1, 3);
        else if (nibbles) block(j, sums, w, x, rows, 1, 2);
        else if (three) block(j, sums, w, x, rows, 0, 3);
        else block(j, sums, w, x, rows, 0, 2);
        linear_store(j, (const float *)sums, row, panel, (int)rows, 1);
    }
}

#endif
