/* y = x W^T with codes of 4 or 8 bits, W = code * scale + min, where the machine multiplies bytes and
 * adds up four products (VNNI), or words of 16 bits and adds up two (AVX2).
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
 * digits of its elements, the highest first, or their words, and then a pair of fp32 per chunk.
 */
#include "digits.h"

#if HAS_BYTES
#include "digits_bytes.h"
#elif HAS_WORDS
#include "digits_words.h"
#endif

#if HAS_DIGITS

INLINE long chunks_of(long k, long group)
{
    const long last = k % group;
    return k / group * ((group + CHUNK - 1) / CHUNK) + (last + CHUNK - 1) / CHUNK;
}

long linear_digits_row(long k, long group, int digits)
{
    return digits * k + chunks_of(k, group) * (long)sizeof(chunk_numbers);
}

INLINE void prepare(const linear_job *j, char *out, const void *x, long k, const int nibbles,
                    const int dtype)
{
    const int digits = digits_for(dtype);
    const float halves = codes_of(j->format) == MXFP4 ? .5f : 1;
    chunk_numbers *numbers = (chunk_numbers *)(out + digits * j->k);
    for (long at = 0, count; at < j->k; at += count) {
        const long left = j->group - at % j->group, end = j->k - at;
        count = left < CHUNK ? left : CHUNK;
        if (end < count) count = end;
        const long there = k - at < count ? k - at : count;
        *numbers = prepare_chunk(out + digits * at, x, at, there, count, nibbles, dtype, digits);
        numbers++->unit *= halves;
    }
}

void linear_digits_prepare(const linear_job *j, char *out, const void *x, long k, int dtype)
{
    const int nibbles = codes_of(j->format) != AFFINE8;
    if (HAS_BYTES && nibbles && dtype == F32) prepare(j, out, x, k, 1, F32);
    else if (HAS_BYTES && dtype == F32) prepare(j, out, x, k, 0, F32);
    else if (nibbles) prepare(j, out, x, k, 1, BF16);
    else prepare(j, out, x, k, 0, BF16);
}

INLINE void prefetch(const char *from, long bytes, int stream)
{
    for (long at = 0; stream && at < bytes; at += 64) __builtin_prefetch(from + at, 0, 0);
    for (long at = 0; !stream && at < bytes; at += 64) __builtin_prefetch(from + at);
}

INLINE void block(const linear_job *j, vf *sums, const char *w, const char *x, long rows,
                  const int kind, const int digits)
{
    const chunk_numbers *numbers = (const chunk_numbers *)(x + digits * j->k);
    for (long at = 0; at < j->k;) {
        const long end = at + j->group < j->k ? at + j->group : j->k;
        header h;
        read_header(&h, w, j->format);
        w += header_bytes(j->format);
        for (long count; at < end; at += count) {
            count = end - at < CHUNK ? end - at : CHUNK;
            const long bytes = count / per_lane(kind) * STRIP;
            const char *of = x + digits * at;
            prefetch(w + AHEAD, bytes + STRIP, j->stream);
            switch (count / 8) {
            case 1: add_chunk(j, sums, w, &h, of, numbers, rows, 2, kind, digits); break;
            case 2: add_chunk(j, sums, w, &h, of, numbers, rows, 4, kind, digits); break;
            case 3: add_chunk(j, sums, w, &h, of, numbers, rows, 6, kind, digits); break;
            default: add_chunk(j, sums, w, &h, of, numbers, rows, 8, kind, digits);
            }
            w += bytes;
            numbers++;
        }
    }
}

void linear_digits_block(const linear_job *j, long panel, int panels, long first, long last)
{
    vf sums[MAX_BLOCK_TILES * MAX_ROWS * 2];
    const int kind = codes_of(j->format), three = j->x_format == THREE_DIGITS;
    const long row = tile_start(j, first), rows = tile_start(j, last) - row;
    for (const long end = panel + panels; panel < end; panel++) {
        const char *w = j->w + panel * j->panel_bytes, *x = j->x + row * j->x_stride;
        memset(sums, 0, (size_t)(rows * PANEL * 4));
        if (HAS_BYTES && three && kind == INT4) block(j, sums, w, x, rows, INT4, 3);
        else if (HAS_BYTES && three) block(j, sums, w, x, rows, AFFINE8, 3);
        else if (HAS_WORDS && kind == MXFP4) block(j, sums, w, x, rows, MXFP4, 2);
        else if (kind == INT4) block(j, sums, w, x, rows, INT4, 2);
        else block(j, sums, w, x, rows, AFFINE8, 2);
        linear_store(j, (const float *)sums, row, panel, (int)rows, 1);
    }
}

#endif
