/* y = x W^T + bias over a weight that was packed into panels.
 *
 * Every output element is one chain of fused multiply-adds over k = 0, 1, 2, ..., whatever the
 * number of rows, the tile that computes it or the thread that runs the tile. A row of y is
 * therefore bit for bit the same alone, in a window of drafts and inside a prefill chunk.
 *
 * Packed layout: panels of PANEL columns; in a panel, k runs slowest. bf16 puts columns k and
 * k+1 side by side in one 32-bit lane: a shift and a mask widen them, and it is the operand
 * order of the dot-product instruction where the machine has one.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "digits.h"
#include "ops.h"
#include "pool.h"

/* With more rows what is prefetched past the caches would be gone before it is used. */
enum { STREAM_ROWS = 3 };

/* A row block of x is kept within this, so that it stays in the second-level cache. */
static const long BLOCK_BYTES = 192 * 1024;

INLINE void step_f32(vf acc[][2], const char *w, const char *x, long stride, const int rows)
{
    multiply_add(acc, (vf)load_lanes(w, 0), (vf)load_lanes(w, 1), x, stride, rows);
}

/* Two steps over k. */
#if HAS_DOT
/* x is bf16: two of its elements are one operand. */
INLINE void step_bf16(vf acc[][2], const char *w, const char *x, long stride, const int rows)
{
    add_dots(acc, load_lanes(w, 0), load_lanes(w, 1), x, stride, rows);
}
#else
/* x is fp32. */
INLINE void step_bf16(vf acc[][2], const char *w, const char *x, long stride, const int rows)
{
    multiply_add(acc, (vf)(load_lanes(w, 0) << 16), (vf)(load_lanes(w, 1) << 16), x, stride, rows);
    __asm__ volatile("" ::: "memory"); /* load again rather than spill an accumulator */
    multiply_add(acc, (vf)(load_lanes(w, 0) & 0xffff0000), (vf)(load_lanes(w, 1) & 0xffff0000),
                 x + sizeof(float), stride, rows);
}
#endif

/* `columns` columns of a row, from `first` on. */
INLINE void store_row(const linear_job *j, const float *sum, long out, long first, long columns,
                      const int dtype)
{
    long c = 0;
    for (; c + LANES <= columns; c += LANES) {
        vf value = (vf)load_lanes((const char *)(sum + c), 0);
        if (j->bias) value += (vf)load_lanes((const char *)(j->bias + first + c), 0);
        store_lanes(j->y, out + c, value, dtype);
    }
    for (; c < columns; c++) store1(j->y, out + c, sum[c] + (j->bias ? j->bias[first + c] : 0), dtype);
}

/* Separate from the tiles, so that it is compiled once. */
void linear_store(const linear_job *j, const float *sums, long row, long panel, int rows,
                  int panels)
{
    const long first = panel * PANEL, width = panels * PANEL, n = j->n;
    const long columns = n - first < width ? n - first : width;
    for (long r = 0; r < rows; r++) {
        const float *sum = sums + r * width;
        if (j->y_dtype == BF16) store_row(j, sum, (row + r) * n + first, first, columns, BF16);
        else store_row(j, sum, (row + r) * n + first, first, columns, F32);
    }
}

INLINE void tile(const linear_job *j, long row, long panel, const int rows, const int panels,
                 const int dtype)
{
    vf acc[TASK_PANELS][MAX_ROWS][2], sums[MAX_ROWS * TASK_PANELS * 2];
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) acc[p][r][0] = acc[p][r][1] = (vf){0};

    const int per_step = dtype == BF16 ? 2 : 1;
    const long x_step = per_step * element_size(dtype == BF16 && HAS_DOT ? BF16 : F32);
    const long steps = j->k / per_step, stride = j->panel_bytes, x_stride = j->x_stride;
    const char *w = j->w + panel * stride, *x = j->x + row * x_stride;
    for (long s = 0; s < steps; s++, w += PANEL * 4, x += x_step) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            __builtin_prefetch(w + p * stride + AHEAD, 0, 2);
            __builtin_prefetch(w + p * stride + AHEAD + 64, 0, 2);
            if (dtype == BF16) step_bf16(acc[p], w + p * stride, x, x_stride, rows);
            else step_f32(acc[p], w + p * stride, x, x_stride, rows);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            sums[(r * panels + p) * 2] = acc[p][r][0];
            sums[(r * panels + p) * 2 + 1] = acc[p][r][1];
        }
    linear_store(j, (const float *)sums, row, panel, rows, panels);
}

#define TILE(r, p) \
    case (r) * 8 + (p): \
        if (j->format == BF16) tile(j, row, panel, r, p, BF16); \
        else tile(j, row, panel, r, p, F32); \
        break;

static void run_tile(const linear_job *j, long row, long panel, long rows, int panels)
{
    switch (rows * 8 + panels) {
        ALL_TILES
    }
}

static void plain_block(const linear_job *j, long panel, int panels, long first, long last)
{
    for (long t = first; t < last; t++) {
        long row = tile_start(j, t);
        run_tile(j, row, panel, tile_start(j, t + 1) - row, panels);
    }
}

/* Panels computed together, for enough independent chains with a single row. */
INLINE int panels_for(long rows) { return rows <= 1 ? TASK_PANELS : 1; }

/* A few panels times a block of row tiles. */
static void linear_task(const void *job, long index)
{
    const linear_job *j = job;
    long first = index / j->groups * j->block_tiles;
    long last = first + j->block_tiles < j->tiles ? first + j->block_tiles : j->tiles;
    long panel = index % j->groups * TASK_PANELS, panels = (j->n + PANEL - 1) / PANEL;
    long end = panel + TASK_PANELS < panels ? panel + TASK_PANELS : panels;
    int together = panels_for(tile_start(j, 1));
    for (; panel < end; panel += together) {
        if (panel + together > end) together = 1;
        j->block(j, panel, together, first, last);
    }
}

typedef struct {
    const linear_job *linear;
    const void *x;
    char *out;
    long k;
    int dtype;
} widen_job;

enum { WIDEN_ROWS = 16 };

/* A row of x as the tiles read it: fp32, or bf16 for the dot product; then zeros. */
static void widen(const widen_job *j, char *out, long row)
{
    const int wide = j->linear->x_format;
    const long size = element_size(wide), at = row * j->k;
    if (wide == j->dtype) memcpy(out, element(j->x, at, wide), (size_t)(j->k * size));
    else {
        long c = 0;
        for (; c + 8 <= j->k; c += 8) store8(out, c, load8(j->x, at + c, BF16), F32);
        for (; c < j->k; c++) store1(out, c, load1(j->x, at + c, BF16), F32);
    }
    memset(out + j->k * size, 0, (size_t)((j->linear->k - j->k) * size));
}

static void widen_task(const void *job, long index)
{
    const widen_job *j = job;
    long first = index * WIDEN_ROWS, end = first + WIDEN_ROWS;
    for (long row = first; row < end && row < j->linear->m; row++) {
        char *out = j->out + row * j->linear->x_stride;
#if HAS_DIGITS
        if (j->linear->x_format >= TWO_DIGITS) {
            linear_digits_prepare(j->linear, out, element(j->x, row * j->k, j->dtype), j->k, j->dtype);
            continue;
        }
#endif
        widen(j, out, row);
        if (j->linear->group) linear_quantized_prepare(j->linear, (float *)out);
    }
}

static char *scratch(size_t bytes)
{
    static _Thread_local struct { void *data; size_t size; } kept;
    if (kept.size < bytes) {
        free(kept.data);
        kept.size = bytes;
        if (posix_memalign(&kept.data, 64, bytes)) abort();
    }
    return kept.data;
}

static long row_bytes(const linear_job *j)
{
#if HAS_DIGITS
    if (j->x_format >= TWO_DIGITS) return linear_digits_row(j->k, j->group, j->x_format);
#endif
    long groups = j->group ? (j->k + j->group - 1) / j->group : 0;
    return j->k * element_size(j->x_format) + groups * 4;
}

/* For a job with everything set but x and the tiles; k as in x. */
static void run(linear_job *j, const void *x, long k, int x_dtype)
{
    j->tiles = (j->m + MAX_ROWS - 1) / MAX_ROWS;
    j->groups = (j->n + PANEL * TASK_PANELS - 1) / (PANEL * TASK_PANELS);
    /* One cache line more than the row: rows of 2^n elements would share one cache set. */
    j->x_stride = (row_bytes(j) + 63) / 64 * 64 + 64;
    j->block_tiles = BLOCK_BYTES / (MAX_ROWS * j->x_stride);
    if (j->block_tiles < 1) j->block_tiles = 1;
    if (j->block_tiles > MAX_BLOCK_TILES) j->block_tiles = MAX_BLOCK_TILES;
    j->stream = j->stream && j->m <= STREAM_ROWS;
    char *wide = scratch((size_t)(j->m * j->x_stride));
    widen_job widen = {j, x, wide, k, x_dtype};
    parallel_for(widen_task, &widen, (j->m + WIDEN_ROWS - 1) / WIDEN_ROWS);
    j->x = wide;
    parallel_for(linear_task, j, j->groups * ((j->tiles + j->block_tiles - 1) / j->block_tiles));
}

int surestep_panel_width(void) { return PANEL; }

static long panel_bytes(long k, long group, int format)
{
    const int plain = format == F32 || format == BF16;
    const long packed = packed_length(k, format);
    return plain ? packed * PANEL * element_size(format) : linear_quantized_panel(packed, group, format);
}

long linear_bytes(long n, long k, long group, int format)
{
    return (n + PANEL - 1) / PANEL * panel_bytes(k, group, format);
}

void linear_multiply(void *y, const void *x, const void *w, const float *bias, long m, long n, long k,
                     long group, int format, int x_dtype, int y_dtype, int stream)
{
    if (m == 0) return;
    const int dot = HAS_DOT && (format == BF16 || (codes_of(format) == MXFP4 && x_dtype == BF16));
    linear_job j = {.w = w, .bias = bias, .y = y, .m = m, .n = n, .k = packed_length(k, format),
                    .group = group, .format = format, .x_format = dot ? BF16 : F32,
                    .y_dtype = y_dtype, .stream = stream};
    j.panel_bytes = panel_bytes(k, group, format);
    j.block = group ? linear_quantized_block : plain_block;
#if HAS_DIGITS
    if (by_digits(format, x_dtype)) {
        j.x_format = digits_for(x_dtype);
        j.block = linear_digits_block;
    }
#endif
    run(&j, x, k, x_dtype);
}

/* x [m, k] in x_dtype, which is the weight's own where that is F32 or BF16; y [m, n] in y_dtype. */
void surestep_linear(void *y, const void *x, const void *w, const float *bias, long m, long n,
                     long k, long group, int format, int x_dtype, int y_dtype)
{
    const int stream = linear_streams(linear_bytes(n, k, group, format));
    linear_multiply(y, x, w, bias, m, n, k, group, format, x_dtype, y_dtype, stream);
}

typedef struct {
    char *out;
    const char *w;
    long n, k, packed_k;
    int dtype;
} pack_job;

static void pack_task(const void *job, long panel)
{
    const pack_job *j = job;
    long size = element_size(j->dtype), pair = j->dtype == BF16 ? 2 : 1;
    char *out = j->out + panel * PANEL * j->packed_k * size;
    memset(out, 0, (size_t)(PANEL * j->packed_k * size));
    for (long c = 0; c < PANEL && panel * PANEL + c < j->n; c++) {
        const char *column = j->w + (panel * PANEL + c) * j->k * size;
        for (long k = 0; k < j->k; k++)
            memcpy(out + ((k / pair * PANEL + c) * pair + k % pair) * size, column + k * size,
                   (size_t)size);
    }
}

void linear_huge_pages(void *out, long bytes)
{
    const uintptr_t page = 4096, to = (uintptr_t)out + (uintptr_t)bytes;
    uintptr_t from = ((uintptr_t)out + page - 1) / page * page;
    if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
}

/* Weight [n, k] to panels. out has room for n rounded up to PANEL times k rounded up to 2. */
void surestep_pack_linear(void *out, const void *w, long n, long k, int dtype)
{
    pack_job j = {out, w, n, k, packed_length(k, dtype), dtype};
    long panels = (n + PANEL - 1) / PANEL;
    linear_huge_pages(out, panels * PANEL * j.packed_k * element_size(dtype));
    parallel_for(pack_task, &j, panels);
}
