/* Products of unsigned codes with rows of x in fixed point: see digits.c. */
#pragma once

#include "quantized_layout.h"

/* What the machine multiplies: bytes, four products in a sum, or words of 16 bits, two in one. */
#if defined(__AVX512VNNI__)
#define HAS_BYTES 1
#define HAS_WORDS 0
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_BYTES 0
#define HAS_WORDS 1
#else
#define HAS_BYTES 0
#define HAS_WORDS 0
#endif
#define HAS_DIGITS (HAS_BYTES || HAS_WORDS)

/* How such a product reads x, beside the element types: as numbers of so many digits. */
enum { TWO_DIGITS = 2, THREE_DIGITS = 3 };

/* Whether the product of a weight and x goes this way. */
INLINE int by_digits(const int format, const int x_dtype)
{
    const int codes = codes_of(format);
    if (HAS_BYTES) return has_mins(codes);
    return HAS_WORDS && x_dtype == BF16 && (has_mins(codes) || codes == MXFP4);
}

INLINE int digits_for(const int dtype) { return dtype == BF16 ? TWO_DIGITS : THREE_DIGITS; }

/* Bytes of that, k as packed. */
long linear_digits_row(long k, long group, int digits);

/* A row of x [k] of an element type as the block function takes it. */
void linear_digits_prepare(const linear_job *j, char *out, const void *x, long k, int dtype);

/* The block function. */
void linear_digits_block(const linear_job *j, long panel, int panels, long first, long last);
