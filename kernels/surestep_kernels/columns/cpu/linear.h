/* What the matrix products of all weight formats share: panels, jobs, and the loop over tiles. */
#pragma once

#include "vec.h"

#if defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

/* How weights are stored: F32 and BF16 of vec.h, and those whose elements share scales in groups. */
enum {
    FP8 = 2, INT4 = 3, MXFP4 = 4, AFFINE4 = 5, AFFINE8 = 6, AFFINE4_F32 = 7, AFFINE8_F32 = 8, NVFP4 = 9
};

/* ALL_TILES: TILE(rows, panels) for every shape that fits into the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, MAX_ROWS = 12, TASK_PANELS = 1 }; /* 32 registers */
#define ALL_TILES \
    TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1) \
    TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
#else
enum { LANES = 8, MAX_ROWS = 5, TASK_PANELS = 2 }; /* 16 registers */
#define ALL_TILES \
    TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(1, 2)
#endif
enum { PANEL = 2 * LANES };

enum { MAX_GROUP = 128 };      /* elements of k that share a scale */
enum { MAX_BLOCK_TILES = 32 }; /* row tiles that one call of a block function covers */

/* Bytes to prefetch ahead; panels follow each other in memory. Measured with one thread and two: the
 * best of 1024 to 16384. */
enum { AHEAD = 4096 };

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

typedef struct linear_job linear_job;

/* Multiply rows of the tiles first..last by `panels` panels from `panel` on. */
typedef void (*block_fn)(const linear_job *job, long panel, int panels, long first, long last);

/* On lines of its own: it lies on the stack of a thread that writes beside it, and others read it. */
struct __attribute__((aligned(64))) linear_job {
    const char *w;
    const float *bias; /* [panels * PANEL] or NULL */
    const char *x;     /* [m, k], zeros up to k; if quantised: then fp32 sums of the groups */
    void *y;           /* [m, n] */
    long m, n, k;      /* k as packed */
    long group;        /* elements of k that share a scale, MAX_GROUP at most; 0: plain */
    long panel_bytes, x_stride;
    int format, x_format, y_dtype; /* x_format: as the tiles read x */
    int stream; /* the weight is read past the caches */
    block_fn block;
    long tiles, block_tiles, groups;
};

/* a * x + c in every lane, rounded once. */
INLINE vf fma_lanes(vf a, vf x, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)x, (__m512)c);
#else
    return fma8(a, x, c);
#endif
}

INLINE vf splat(float x)
{
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(x);
#else
    return splat8(x);
#endif
}

/* round8 for all lanes. */
INLINE vu round_lanes(vf x)
{
#if defined(__AVX512F__)
    const __m512i wide = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (vu)_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
#else
    return round8(x);
#endif
}

/* store8 for all lanes. */
INLINE void store_lanes(void *base, long index, vf x, const int dtype)
{
    if (dtype != BF16) {
        memcpy((char *)base + index * 4, &x, sizeof x);
        return;
    }
    const vh narrow = __builtin_convertvector(round_lanes(x), vh);
    memcpy((char *)base + index * 2, &narrow, sizeof narrow);
}

INLINE vu load_lanes(const char *w, int half)
{
    vu bits;
    memcpy(&bits, w + half * (long)sizeof bits, sizeof bits);
    return bits;
}

/* Keeps the compiler from loading x again for each of its uses, which are too many for the machine. */
INLINE vf loaded(vf x)
{
#if defined(__AVX__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

#if HAS_DOT
/* Two steps over k for one panel: pairs of bf16 in the lanes of w and in x. */
INLINE void add_dots(vf acc[][2], vu w0, vu w1, const char *x, long stride, const int rows)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int *)(x + r * stride));
        acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], (__m512bh)w0, pair);
        acc[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc[r][1], (__m512bh)w1, pair);
    }
}
#endif

/* One step over k for one panel: acc[r][h] += w[h] * x[r]; x has its rows `stride` bytes apart. */
INLINE void multiply_add(vf acc[][2], vf w0, vf w1, const char *x, long stride, const int rows)
{
    w0 = loaded(w0);
    w1 = loaded(w1);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf value = splat(*(const float *)(x + r * stride));
        acc[r][0] = fma_lanes(w0, value, acc[r][0]);
        acc[r][1] = fma_lanes(w1, value, acc[r][1]);
    }
}

/* Rows 0..m are cut into tiles of nearly equal height: a short last tile would be slow. */
INLINE long tile_start(const linear_job *j, long tile)
{
    long base = j->m / j->tiles, extra = j->m % j->tiles;
    return tile * base + (tile < extra ? tile : extra);
}

/* Elements of k as packed: whole lanes of 32 bits, and eights of what is summed in eights. */
INLINE long packed_length(long k, int format)
{
    long per_lane = format == F32 ? 1 : format == BF16 ? 2 : format == FP8 ? 4 : 8;
    return (k + per_lane - 1) / per_lane * per_lane;
}

/* Finished sums [rows, panels * PANEL] to y, with the bias. */
void linear_store(const linear_job *j, const float *sums, long row, long panel, int rows,
                  int panels);

/* Ask for huge pages: the hardware prefetcher stops at page borders. Only a hint. */
void linear_huge_pages(void *out, long bytes);

/* Whether weights of so many bytes, which are read one after the other, should go past the caches:
 * little of them would be there the next time, and what the interpreter needs would not. */
int linear_streams(long bytes);

/* Bytes of a packed weight [n, k]. */
long linear_bytes(long n, long k, long group, int format);

/* surestep_linear of a weight that is read past the caches, or not. */
void linear_multiply(void *y, const void *x, const void *w, const float *bias, long m, long n, long k,
                     long group, int format, int x_dtype, int y_dtype, int stream);

/* The block function of quantised weights. */
void linear_quantized_block(const linear_job *j, long panel, int panels, long first, long last);

/* A row of x as the block function takes it, with its sums over the groups. */
void linear_quantized_prepare(const linear_job *j, float *x);

/* Bytes of a packed panel of k elements. */
long linear_quantized_panel(long k, long group, int format);
