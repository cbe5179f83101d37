/* Weights of 8 and 4 bits whose elements share scales in groups: y = x W^T with
 * W[n, k] = code * scale + min, scale and min of column n and the group of k.
 *
 * A lane of 32 bits holds 4 or 8 codes of one column, lowest bits first. A panel is, group after
 * group, a header and then its codes; it streams like a plain one. The header is
 *   FP8    the scales in fp32; min is 0
 *   INT4   the same; they come from 16 bits and so leave room for zero points in their lowest four.
 *          min = -zero * scale is exact, too
 *   MXFP4  a byte per column, the exponent of a power of two; min is 0
 *   NVFP4  the scales in fp32; min is 0
 *   AFFINE the scales, then the mins: in fp16 if that holds all of the weight's, otherwise in fp32.
 *
 * Few instructions per code matter most, so codes are only moved and masked to where they make a
 * number that is a power of two off; x and the scales make up for it, exactly:
 *   FP8   E4M3 where fp32 has sign, exponent and mantissa is 2^-120 of the value, subnormals
 *         included. x comes 2^60 times too large, which keeps all sums far from fp32's own
 *         subnormals, and the packed scales another 2^60.
 *   INT4  a code that stays at bit b is 2^b times too large; the x for its place comes that much
 *         smaller. Only the last code of a lane is moved. The same holds for AFFINE codes, of 4 or 8
 *         bits. The mins are multiplied by sums of groups of x.
 *   MXFP4 codes, and NVFP4's, are looked up in a table of 16 numbers, which are exact. If x is bf16
 *         and the machine multiplies pairs of bf16, they are looked up in pairs.
 *
 * Every output element is one chain of fused multiply-adds over the codes of a group, starting at
 * 0, and one over the groups. Whether codes are moved in registers or ahead of several row tiles
 * makes no difference, so a row of y is bit for bit the same at any number of rows.
 *
 * On machines that multiply bytes, INT4 and AFFINE go another way, and with AVX2 these and MXFP4 and
 * NVFP4 where x is bf16: see digits.c.
 */
#include "quantized_header.h"

/* One group of the panels that are worked on together. */
typedef struct {
    header headers[TASK_PANELS];
    const char *codes; /* or moved ones: format F32, or BF16 of pairs */
    long stride;       /* bytes from panel to panel */
    long count;        /* elements of k */
    const char *x;     /* [rows, count] */
    long x_stride;
    long x_sums;       /* bytes from a row of x to its sum over the group */
} group;

/* Group i of the panels, where w is the header in the first of them, and of the rows at x. */
INLINE group read_group(const linear_job *j, const char *w, const char *x, long i, int panels,
                        const int format)
{
    const long size = of_pairs(format) ? 2 : 4, left = j->k - i * j->group;
    group g = {.codes = w + header_bytes(j->format), .stride = j->panel_bytes,
               .count = left < j->group ? left : j->group, .x = x + size * i * j->group,
               .x_stride = j->x_stride, .x_sums = size * left + 4 * i};
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++) read_header(&g.headers[p], w + p * g.stride, j->format);
    return g;
}

/* Code or pair i of every lane of half a panel, a power of two off but for MXFP4. */
INLINE vf decode(const char *codes, int half, int i, const int format)
{
    vu lanes = load_lanes(codes, half);
    if (format == F32 || format == BF16) return (vf)lanes;
#if HAS_DOT
    if (format == MXFP4_PAIRS) return e2m1_pair(lanes, i);
#endif
    if (format == MXFP4) return e2m1(lanes, i);
    if (has_mins(format)) { /* whole numbers; bit 31 would be a sign */
        const int bits = 32 / per_lane(format), last = per_lane(format) - 1;
        vu code = i == last ? lanes >> (32 - bits) : lanes & ((1u << bits) - 1) << bits * i;
        return __builtin_convertvector((vi)code, vf);
    }
    vi moved = (vi)(lanes << (24 - 8 * i)) >> 4; /* arithmetic: the sign stays at the top */
    return (vf)(moved & (int32_t)0x87f00000);
}

/* sums[r][panel][half] += scale * sum of code * x, then += min * sum of x. */
INLINE void add_group(const group *g, long row, vf *sums, const int rows, const int panels,
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
                vf scaled = fma_lanes(acc[p][r][half], g->headers[p].scale[half], *sum);
                *sum = fma_lanes(g->headers[p].min[half], x_sum, scaled);
            }
    }
}

/* All groups of a tile, whose sums start at 0. */
INLINE void tile(const linear_job *j, const char *w, const char *x, vf *sums, const int rows,
                 const int panels, const int format)
{
    for (long i = 0; i * j->group < j->k; i++) {
        group g = read_group(j, w, x, i, panels, format);
        add_group(&g, 0, sums, rows, panels, format);
        w += header_bytes(j->format) + g.count / per_lane(format) * STRIP;
    }
}

#if HAS_DOT
#define TILE_OF_PAIRS(r, p) else if (format == MXFP4_PAIRS) tile(j, w, x, sums, r, p, MXFP4_PAIRS);
#else
#define TILE_OF_PAIRS(r, p)
#endif

#define TILE(r, p) \
    case (r) * 8 + (p): \
        if (format == FP8) tile(j, w, x, sums, r, p, FP8); \
        else if (format == INT4) tile(j, w, x, sums, r, p, INT4); \
        else if (format == AFFINE8) tile(j, w, x, sums, r, p, AFFINE8); \
        TILE_OF_PAIRS(r, p) \
        else tile(j, w, x, sums, r, p, MXFP4); \
        break;

static void run_tile(const linear_job *j, const char *w, const char *x, vf *sums, long rows,
                     int panels, int format)
{
    switch (rows * 8 + panels) {
        ALL_TILES
    }
}
#undef TILE

#if HAS_DOT
#define MOVED_PAIRS(r, p) if (pairs) add_group(g, row, sums, r, p, BF16); else
#else
#define MOVED_PAIRS(r, p)
#endif

#define TILE(r, p) \
    case (r) * 8 + (p): \
        MOVED_PAIRS(r, p) add_group(g, row, sums, r, p, F32); \
        break;

/* A group of a tile, of which the codes have been moved. */
static void run_moved(const group *g, long row, vf *sums, long rows, int panels, int pairs)
{
    (void)pairs;
    switch (rows * 8 + panels) {
        ALL_TILES
    }
}

/* Moves the codes of a group once for several row tiles: to out [panels, MAX_GROUP, PANEL]. */
INLINE void move_codes(group *g, vf *out, int panels, const int format)
{
    for (int p = 0; p < panels; p++) {
        const char *codes = g->codes + p * g->stride;
        vf *to = out + p * MAX_GROUP * 2;
        for (long k = 0; k < g->count; k += per_lane(format), codes += STRIP) {
            __builtin_prefetch(codes + AHEAD);
#pragma GCC unroll 8
            for (int i = 0; i < operands(format); i++, to += 2) {
                to[0] = decode(codes, 0, i, format);
                to[1] = decode(codes, 1, i, format);
            }
        }
    }
    g->codes = (const char *)out;
    g->stride = MAX_GROUP * PANEL * 4;
}

/* All groups of several tiles, whose sums start at 0. */
INLINE void tiles(const linear_job *j, const char *w, const char *x, vf *sums, long first,
                  long last, int panels, const int format)
{
    vf moved[TASK_PANELS * MAX_GROUP * 2];
    for (long i = 0; i * j->group < j->k; i++) {
        group g = read_group(j, w, x, i, panels, format);
        move_codes(&g, moved, panels, format);
        for (long t = first; t < last; t++) {
            long row = tile_start(j, t), rows = tile_start(j, t + 1) - row;
            run_moved(&g, row - tile_start(j, first), sums, rows, panels, of_pairs(format));
        }
        w += header_bytes(j->format) + g.count / per_lane(format) * STRIP;
    }
}

static void run_tiles(const linear_job *j, const char *w, const char *x, vf *sums, long first,
                      long last, int panels, int format)
{
    if (format == FP8) tiles(j, w, x, sums, first, last, panels, FP8);
    else if (format == INT4) tiles(j, w, x, sums, first, last, panels, INT4);
    else if (format == AFFINE8) tiles(j, w, x, sums, first, last, panels, AFFINE8);
#if HAS_DOT
    else if (format == MXFP4_PAIRS) tiles(j, w, x, sums, first, last, panels, MXFP4_PAIRS);
#endif
    else tiles(j, w, x, sums, first, last, panels, MXFP4);
}

void linear_quantized_block(const linear_job *j, long panel, int panels, long first, long last)
{
    vf sums[MAX_BLOCK_TILES * MAX_ROWS * TASK_PANELS * 2];
    const long row = tile_start(j, first), rows = tile_start(j, last) - row;
    const int format = j->x_format == BF16 ? MXFP4_PAIRS : codes_of(j->format);
    const char *w = j->w + panel * j->panel_bytes, *x = j->x + row * j->x_stride;
    memset(sums, 0, (size_t)(rows * panels * PANEL * 4));
    if (last - first == 1) run_tile(j, w, x, sums, rows, panels, format);
    else run_tiles(j, w, x, sums, first, last, panels, format);
    for (long t = first; t < last; t++) {
        long from = tile_start(j, t), end = tile_start(j, t + 1);
        const float *done = (const float *)(sums + (from - row) * panels * 2);
        linear_store(j, done, from, panel, (int)(end - from), panels);
    }
}

void linear_quantized_prepare(const linear_job *j, float *x)
{
    if (j->x_format == BF16) {
        uint16_t *pairs = (uint16_t *)x;
        for (long k = 0; k < j->k; k += 8) order_for_pairs(pairs + k);
        const long groups = (j->k + j->group - 1) / j->group;
        memset(pairs + j->k, 0, (size_t)groups * sizeof *x); /* no sums are needed */
        return;
    }
    const int codes = codes_of(j->format), bits = 32 / per_lane(codes);
    f8 factors = splat8(codes == FP8 ? 0x1p60f : 1);
    if (has_mins(codes))
        for (int i = 0; i < 8; i++) {
            const int place = i % per_lane(codes), is_last = place == per_lane(codes) - 1;
            factors[i] = is_last ? 1 : 1.0f / (float)(1u << bits * place);
        }
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
        *sums++ = has_mins(codes) ? sum_lanes(sum) : 0;
    }
}
