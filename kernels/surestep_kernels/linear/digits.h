/* Products of unsigned codes with rows of x in fixed point: see digits.c. */
#pragma once

#include "quantized_layout.h"

#if defined(__AVX512VNNI__)
#define HAS_DIGITS 1
#else
#define HAS_DIGITS 0
#endif

/* How such a product reads x, beside the element types: as numbers of so many digits. */
enum { TWO_DIGITS = 2, THREE_DIGITS = 3 };

INLINE int digits_for(const int dtype) { return dtype == BF16 ? TWO_DIGITS : THREE_DIGITS; }

/* Bytes of that, k as packed. */
long linear_digits_row(long k, long group, int digits);

/* A row of x [k] of an element type as the block function takes it. */
void linear_digits_prepare(const linear_job *j, char *out, const void *x, long k, int dtype);

/* The block function. */
void linear_digits_block(const linear_job *j, long panel, int panels, long first, long last);
