/* The headers of groups: see quantized.c. */
#pragma once

#include "mxfp4.h"
#include "quantized_layout.h"

/* Of one panel, in its two halves. */
typedef struct {
    vf scale[2], min[2];
} header;

/* Finite numbers in fp16, of half a panel. */
INLINE vf widen_fp16(const char *numbers, int half)
{
    vh narrow;
    memcpy(&narrow, numbers + half * (long)sizeof narrow, sizeof narrow);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)narrow);
#else /* where fp32 has exponent and mantissa they are 2^-112 of it, subnormals included */
    vu wide = __builtin_convertvector(narrow, vu);
    vf size = (vf)((wide & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (wide & 0x8000) << 16);
#endif
}

INLINE void read_header(header *to, const char *at, int format)
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vf *scale = &to->scale[half], *min = &to->min[half];
        *min = splat(0);
        if (format == MXFP4) *scale = e8m0(at, half);
        else if (has_fp16_header(format)) {
            *scale = widen_fp16(at, half);
            *min = widen_fp16(at + STRIP / 2, half);
        } else if (format == INT4) {
            vu lanes = load_lanes(at, half);
            *scale = (vf)(lanes & ~0xfu);
            *min = -*scale * __builtin_convertvector((vi)(lanes & 0xf), vf);
        } else {
            *scale = (vf)load_lanes(at, half);
            if (has_fp32_header(format)) *min = (vf)load_lanes(at + STRIP, half);
        }
    }
}
