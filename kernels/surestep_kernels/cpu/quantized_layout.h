/* How codes lie in panels: see linear_quantized.c. */
#pragma once

#include "linear.h"

/* MXFP4, read for the dot product of pairs of bf16. */
enum { MXFP4_PAIRS = 5 };

enum { STRIP = PANEL * 4 }; /* bytes: one lane of every column */

INLINE int per_lane(const int format)
{
    return format == F32 ? 1 : format == BF16 ? 2 : format == FP8 ? 4 : 8;
}

INLINE int of_pairs(const int format) { return format == BF16 || format == MXFP4_PAIRS; }

/* Operands of 32 bits that a lane becomes, and as many of x. */
INLINE int operands(const int format) { return per_lane(format) / (of_pairs(format) ? 2 : 1); }

INLINE int is_mxfp4(const int format) { return format == MXFP4 || format == MXFP4_PAIRS; }

INLINE long header_bytes(const int format) { return is_mxfp4(format) ? PANEL : STRIP; }
