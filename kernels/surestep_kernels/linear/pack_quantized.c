/* Codes and scales to panels: see quantized.c. */
#include "pool.h"
#include "quantized_layout.h"

long linear_quantized_panel(long k, long group, int format)
{
    long groups = (k + group - 1) / group;
    return groups * header_bytes(format) + k / per_lane(format) * STRIP;
}

typedef struct {
    char *out;
    const uint8_t *codes; /* [n, k] */
    const void *scales;   /* [n, groups]: float, the bytes of MXFP4, fp16 where a header has it */
    const uint8_t *zeros; /* [n, groups]; of INT4 only */
    const void *mins;     /* [n, groups], in the type of the scales; of AFFINE only */
    long n, k, group, panel_bytes;
    int format;
} pack_job;

static void pack_header(const pack_job *j, char *out, long column, long at)
{
    if (j->format == MXFP4) {
        out[column] = ((const char *)j->scales)[at];
        return;
    }
    if (j->mins) {
        const long size = has_fp32_header(j->format) ? 4 : 2;
        memcpy(out + column * size, (const char *)j->scales + at * size, (size_t)size);
        memcpy(out + (PANEL + column) * size, (const char *)j->mins + at * size, (size_t)size);
        return;
    }
    float scale = ((const float *)j->scales)[at] * (j->format == FP8 ? 0x1p60f : 1);
    uint32_t lane;
    memcpy(&lane, &scale, sizeof lane);
    ((uint32_t *)out)[column] = lane | (j->zeros ? j->zeros[at] : 0);
}

/* One column of a panel, which is zero so far. */
static void pack_column(const pack_job *j, char *out, long column, long n)
{
    const int count = per_lane(j->format), bits = 32 / count;
    const long groups = (j->k + j->group - 1) / j->group;
    for (long g = 0; g < groups; g++) {
        long end = (g + 1) * j->group < j->k ? (g + 1) * j->group : j->k;
        pack_header(j, out, column, n * groups + g);
        out += header_bytes(j->format);
        for (long k = g * j->group; k < end; k += count, out += STRIP)
            for (long i = 0; i < count && k + i < end; i++)
                ((uint32_t *)out)[column] |= (uint32_t)j->codes[n * j->k + k + i] << bits * i;
    }
}

static void pack_task(const void *job, long panel)
{
    const pack_job *j = job;
    char *out = j->out + panel * j->panel_bytes;
    memset(out, 0, (size_t)j->panel_bytes);
    for (long c = 0; c < PANEL && panel * PANEL + c < j->n; c++)
        pack_column(j, out, c, panel * PANEL + c);
}

/* Bytes that surestep_pack_quantized writes. */
long surestep_packed_bytes(long n, long k, long group, int format)
{
    return (n + PANEL - 1) / PANEL * linear_quantized_panel(packed_length(k, format), group, format);
}

/* Codes [n, k], one per byte, with scales and zeros or mins [n, groups], to panels. */
void surestep_pack_quantized(void *out, const void *codes, const void *scales, const void *zeros,
                             const void *mins, long n, long k, long group, int format)
{
    pack_job j = {out, codes, scales, zeros, mins, n, k, group,
                  linear_quantized_panel(packed_length(k, format), group, format), format};
    linear_huge_pages(out, surestep_packed_bytes(n, k, group, format));
    parallel_for(pack_task, &j, (n + PANEL - 1) / PANEL);
}
