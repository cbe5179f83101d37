/* How codes lie in panels: see quantized.c. */
#pragma once

#include "linear.h"

/* MXFP4, read for the dot product of pairs of bf16. */
enum { MXFP4_PAIRS = 16 };

enum { STRIP = PANEL * 4 }; /* bytes: one lane of every column */

/* Formats with codes of one kind are decoded alike, whatever their headers. */
INLINE int codes_of(const int format)
{
    if (format == AFFINE4 || format == AFFINE4_F32) return INT4;
    if (format == NVFP4) return MXFP4;
    return format == AFFINE8_F32 ? AFFINE8 : format;
}

INLINE int per_lane(const int format)
{
    const int codes = codes_of(format);
    return codes == F32 ? 1 : codes == BF16 ? 2 : codes == FP8 || codes == AFFINE8 ? 4 : 8;
}

INLINE int has_mins(const int codes) { return codes == INT4 || codes == AFFINE8; }

INLINE int of_pairs(const int format) { return format == BF16 || format == MXFP4_PAIRS; }

/* Operands of 32 bits that a lane becomes, and as many of x. */
INLINE int operands(const int format) { return per_lane(format) / (of_pairs(format) ? 2 : 1); }

INLINE int has_fp16_header(const int format) { return format == AFFINE4 || format == AFFINE8; }

INLINE int has_fp32_header(const int format)
{
    return format == AFFINE4_F32 || format == AFFINE8_F32;
}

INLINE long header_bytes(const int format)
{
    return format == MXFP4 ? PANEL : has_fp32_header(format) ? 2 * STRIP : STRIP;
}
