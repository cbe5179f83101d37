/* Weights of 8 and 4 bits whose elements share scales in groups: y = x W^T with
 * W[n, k] = code * scale + min, scale and min of column n and the group of k.
 *
 * A lane of 32 bits holds 4 or 8 codes of one column, lowest bits first. A panel is, group after
 * group, a header and then its codes; it streams like a plain one. The header is
 *   FP8    the scales in fp32; min is 0
 *   INT4   the same; they come from 16 bits and so leave room for zero points in their lowest four.
 *          min = -zero * scale is exact, too
 *   MXFP4  a byte per column, the exponent of a power of two; min is 0
 *   AFFINE the scales, then the mins: in fp16 if that holds all of the weight's, otherwise in fp32.
 *
 * Few instructions per code matter most, so codes are only moved and masked to where they make a
 * number that is a power of two off; x and the scales make up for it, exactly:
 *   FP8   E4M3 where fp32 has sign, exponent and mantissa is 2^-120 of the value, subnormals
 *         included. x comes 2^60 times too large, which keeps all sums far from fp32's own
 *         subnormals, and the packed scales another 2^60.
 *   INT4  a code that stays at bit 4, 8 or 12 is 16, 256 or 4096 times too large; the x for these
 *         places come that much smaller. AFFINE codes, of 4 or 8 bits, are treated alike. The mins
 *         are multiplied by sums of groups of x.
 *   MXFP4 codes are looked up in a table of 16 numbers, which are exact. If x is bf16 and the
 *         machine multiplies pairs of bf16, they are looked up in pairs.
 *
 * Every output element is one chain of fused multiply-adds over the codes of a group, starting at
 * 0, and one over the groups. Whether codes are moved in registers or ahead of several row tiles
 * makes no difference, so a row of y is bit for bit the same at any number of rows.
 */
#include "mxfp4.h"
#include "quantized_layout.h"

/* One group of the panels that are worked on together. */
typedef struct {
    vf scale[TASK_PANELS][2], min[TASK_PANELS][2];
    const char *codes; /* or moved ones: format F32, or BF16 of pairs */
    long stride;       /* bytes from panel to panel */
    long count;        /* elements of k */
    const char *x;     /* [rows, count] */
    long x_stride;
    long x_sums;       /* bytes from a row of x to its sum over the group */
} group;

/* Code or pair i of every lane of half a panel, a power of two off but for MXFP4. */
INLINE vf decode(const char *codes, int half, int i, const int format)
{
    vu lanes = load_lanes(codes, half);
    if (format == F32 || format == BF16) return (vf)lanes;
#if HAS_DOT
    if (format == MXFP4_PAIRS) return e2m1_pair(lanes, i);
#endif
    if (format == MXFP4) return e2m1(lanes, i);
    if (format == INT4) {
        if (i >= 4) lanes >>= 16;
        return __builtin_convertvector((vi)(lanes & 0xfu << 4 * (i % 4)), vf);
    }
    if (format == AFFINE8) {
        vu code = i == 3 ? lanes >> 24 : lanes & 0xffu << 8 * i; /* bit 31 would be a sign */
        return __builtin_convertvector((vi)code, vf);
    }
    vi moved = (vi)(lanes << (24 - 8 * i)) >> 4; /* arithmetic: the sign stays at the top */
    return (vf)(moved & (int32_t)0x87f00000);
}

/* sums[r][panel][half] += scale * sum of code * x, then += min * sum of x. */
INLINE void group_tile(const group *g, long row, vf *sums, const int rows, const int panels,
                       const int format)
{
    vf acc[TASK_PANELS][MAX_ROWS][2];
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) acc[p][r][0] = acc[p][r][1] = (vf){0};

    const char *codes = g->codes, *x = g->x + row * g->x_stride;
    for (long k = 0; k < g->count; k += per_lane(format), codes += STRIP) {
#pragma GCC unroll 8
        for (int i = 0; i < operands(format); i++) {
#pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
                const char *at = codes + p * g->stride;
                if (operands(format) > 1 && i == 0) __builtin_prefetch(at + AHEAD);
                vf w0 = decode(at, 0, i, format), w1 = decode(at, 1, i, format);
                const char *with = x + 4 * i;
#if HAS_DOT
                if (of_pairs(format)) {
                    add_dots(acc[p], (vu)w0, (vu)w1, with, g->x_stride, rows);
                    continue;
                }
#endif
                multiply_add(acc[p], w0, w1, with, g->x_stride, rows);
            }
            __asm__ volatile("" ::: "memory"); /* load again rather than spill an accumulator */
        }
        x += 4 * operands(format);
    }
    sums += row * panels * 2;
    x = g->x + row * g->x_stride + g->x_sums;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf x_sum = splat(*(const float *)(x + r * g->x_stride));
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vf *sum = sums + (r * panels + p) * 2 + half;
                vf scaled = fma_lanes(acc[p][r][half], g->scale[p][half], *sum);
                *sum = fma_lanes(g->min[p][half], x_sum, scaled);
            }
    }
}

#if HAS_DOT
#define TILE_OF_PAIRS(r, p) \
        else if (format == MXFP4_PAIRS) group_tile(g, row, sums, r, p, MXFP4_PAIRS); \
        else if (format == BF16) group_tile(g, row, sums, r, p, BF16);
#else
#define TILE_OF_PAIRS(r, p)
#endif

#define TILE(r, p) \
    case (r) * 8 + (p): \
        if (format == FP8) group_tile(g, row, sums, r, p, FP8); \
        else if (format == INT4) group_tile(g, row, sums, r, p, INT4); \
        else if (format == MXFP4) group_tile(g, row, sums, r, p, MXFP4); \
        else if (format == AFFINE8) group_tile(g, row, sums, r, p, AFFINE8); \
        TILE_OF_PAIRS(r, p) \
        else group_tile(g, row, sums, r, p, F32); \
        break;

static void run_group_tile(const group *g, long row, vf *sums, long rows, int panels, int format)
{
    switch (rows * 8 + panels) {
        ALL_TILES
    }
}

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

INLINE void read_header(group *g, int panels, const int format)
{
    for (int p = 0; p < panels; p++)
        for (int half = 0; half < 2; half++) {
            const char *header = g->codes + p * g->stride;
            vf *scale = &g->scale[p][half], *min = &g->min[p][half];
            *min = splat(0);
            if (is_mxfp4(format)) *scale = e8m0(header, half);
            else if (has_fp16_header(format)) {
                *scale = widen_fp16(header, half);
                *min = widen_fp16(header + STRIP / 2, half);
            } else if (format == INT4) {
                vu lanes = load_lanes(header, half);
                *scale = (vf)(lanes & ~0xfu);
                *min = -*scale * __builtin_convertvector((vi)(lanes & 0xf), vf);
            } else {
                *scale = (vf)load_lanes(header, half);
                if (has_fp32_header(format)) *min = (vf)load_lanes(header + STRIP, half);
            }
        }
    g->codes += header_bytes(format);
}

/* The codes of a group, moved once for several row tiles: [panels, MAX_GROUP, PANEL]. */
INLINE void decode_group(group *g, vf *out, int panels, const int format)
{
    for (int p = 0; p < panels; p++) {
        const char *codes = g->codes + p * g->stride;
        vf *to = out + p * MAX_GROUP * 2;
        for (long k = 0; k < g->count; k += per_lane(format), codes += STRIP) {
            __builtin_prefetch(codes + AHEAD);
#pragma GCC unroll 8
            for (int i = 0; i < operands(format); i++, to += 2) {
                to[0] = decode(codes, 0, i, codes_of(format));
                to[1] = decode(codes, 1, i, codes_of(format));
            }
        }
    }
    g->codes = (const char *)out;
    g->stride = MAX_GROUP * PANEL * 4;
}

INLINE long group_bytes(long count, const int format)
{
    return header_bytes(format) + count / per_lane(format) * STRIP;
}

INLINE void block(const linear_job *j, long panel, int panels, long first, long last,
                  const int format)
{
    vf sums[MAX_BLOCK_TILES * MAX_ROWS * TASK_PANELS * 2], decoded[TASK_PANELS * MAX_GROUP * 2];
    const long first_row = tile_start(j, first), rows = tile_start(j, last) - first_row;
    memset(sums, 0, (size_t)(rows * panels * PANEL * 4));
    const char *codes = j->w + panel * j->panel_bytes, *x = j->x + first_row * j->x_stride;
    for (long k = 0; k < j->k; k += j->group) {
        long count = j->k - k < j->group ? j->k - k : j->group;
        const long size = of_pairs(format) ? 2 : 4, x_sums = size * (j->k - k) + k / j->group * 4;
        group g = {.codes = codes, .stride = j->panel_bytes, .count = count, .x = x + size * k,
                   .x_stride = j->x_stride, .x_sums = x_sums};
        read_header(&g, panels, format);
        int as = codes_of(format);
        if (last - first > 1) {
            decode_group(&g, decoded, panels, format);
            as = of_pairs(format) ? BF16 : F32;
        }
        for (long t = first; t < last; t++) {
            long row = tile_start(j, t), end = tile_start(j, t + 1);
            run_group_tile(&g, row - first_row, sums, end - row, panels, as);
        }
        codes += group_bytes(count, format);
    }
    for (long t = first; t < last; t++) {
        long row = tile_start(j, t), end = tile_start(j, t + 1);
        const float *done = (const float *)(sums + (row - first_row) * panels * 2);
        linear_store(j, done, row, panel, (int)(end - row), panels);
    }
}

void linear_quantized_block(const linear_job *j, long panel, int panels, long first, long last)
{
    if (j->format == FP8) block(j, panel, panels, first, last, FP8);
    else if (j->format == INT4) block(j, panel, panels, first, last, INT4);
#if HAS_DOT
    else if (j->x_format == BF16) block(j, panel, panels, first, last, MXFP4_PAIRS);
#endif
    else if (j->format == MXFP4) block(j, panel, panels, first, last, MXFP4);
    else if (j->format == AFFINE4) block(j, panel, panels, first, last, AFFINE4);
    else if (j->format == AFFINE8) block(j, panel, panels, first, last, AFFINE8);
    else if (j->format == AFFINE4_F32) block(j, panel, panels, first, last, AFFINE4_F32);
    else block(j, panel, panels, first, last, AFFINE8_F32);
}

void linear_quantized_prepare(const linear_job *j, float *x)
{
    if (j->x_format == BF16) {
        uint16_t *pairs = (uint16_t *)x;
        for (long k = 0; k < j->k; k += 8) order_for_pairs(pairs + k);
        memset(pairs + j->k, 0, (size_t)(j->k / j->group) * sizeof *x); /* no sums are needed */
        return;
    }
    const int codes = codes_of(j->format), has_mins = codes == INT4 || codes == AFFINE8;
    const float a = 1, b = 0x1p-4f, c = 0x1p-8f, d = 0x1p-12f, e = 0x1p-16f;
    const f8 factors = codes == INT4 ? (f8){a, b, c, d, a, b, c, d}
                     : codes == AFFINE8 ? (f8){a, c, e, a, a, c, e, a}
                     : splat8(codes == FP8 ? 0x1p60f : 1);
    float *sums = x + j->k;
    for (long k = 0; k < j->k;) {
        long end = k + j->group < j->k ? k + j->group : j->k;
        f8 sum = splat8(0);
        for (; k + 8 <= end; k += 8) {
            f8 values = load8(x, k, F32);
            sum += values;
            store8(x, k, values * factors, F32);
        }
        for (; k < end; k++) x[k] *= factors[0]; /* FP8 only, which needs no sums */
        *sums++ = has_mins ? sum_lanes(sum) : 0;
    }
}
