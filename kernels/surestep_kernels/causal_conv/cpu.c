/* The causal convolution in front of the gated delta rule. */
#include "recurrent.h"

typedef struct {
    ragged r;
    void *out, *conv, *snapshots; /* conv [slots, taps-1+records, C], snapshots [n, taps-1, C] */
    const void *x;
    const float *weight; /* [taps, C] */
    long x_stride, channels, taps, lines, channel_tasks;
    int dtype;
} conv_job;

/* Input at place t >= -history of the row: from the slot before it, from x in it. */
INLINE f8 conv_input(const conv_job *j, const f8 *history, long first, long t, long c,
                     const int dtype)
{
    return t < 0 ? history[j->taps - 1 + t] : load8(j->x, (first + t) * j->x_stride + c, dtype);
}

INLINE void conv_channels(const conv_job *j, long row, long c, const int dtype)
{
    const long first = j->r.cu_rows[row], n = j->r.cu_rows[row + 1] - first, keep = j->taps - 1;
    const long slot = j->r.slots[row] * j->lines, pending = j->r.pending[row];
    const long copy_at = j->r.snapshot_after[row], line = j->r.snapshot_line[row] * keep;
    f8 history[MAX_TAPS];
    if (copy_at > 0 && copy_at <= pending)
        for (long i = 0; i < keep; i++)
            store8(j->snapshots, (line + i) * j->channels + c,
                   load8(j->conv, (slot + copy_at + i) * j->channels + c, dtype), dtype);
    for (long i = 0; i < keep; i++)
        history[i] = j->r.start[row] == 0
                         ? splat8(0)
                         : load8(j->conv, (slot + pending + i) * j->channels + c, dtype);
    for (long t = 0; t < n; t++) {
        f8 sum = splat8(0);
        for (long i = 0; i < j->taps; i++)
            sum = fma8(conv_input(j, history, first, t - keep + i, c, dtype),
                       load8(j->weight, i * j->channels + c, F32), sum);
        store8(j->out, (first + t) * j->channels + c, silu8(rounded8(sum, dtype)), dtype);
        if (!j->r.window[row] && pending + t + 1 == copy_at)
            for (long i = 0; i < keep; i++)
                store8(j->snapshots, (line + i) * j->channels + c,
                       conv_input(j, history, first, t + 1 - keep + i, c, dtype), dtype);
    }
    /* A window keeps everything, a prompt what the next row needs. */
    const long base = j->r.window[row] ? 0 : n, count = j->r.window[row] ? keep + n : keep;
    for (long i = 0; i < count; i++)
        store8(j->conv, (slot + i) * j->channels + c,
               conv_input(j, history, first, base - keep + i, c, dtype), dtype);
}

static void conv_task(const void *job, long index)
{
    const conv_job *j = job;
    const long row = index / j->channel_tasks, c = index % j->channel_tasks * COLUMNS;
    for (long i = c; i < c + COLUMNS && i < j->channels; i += 8) {
        if (j->dtype == BF16) conv_channels(j, row, i, BF16);
        else conv_channels(j, row, i, F32);
    }
}

/* x [T, channels] (rows x_stride apart) -> out [T, channels]: silu of the convolution. */
void surestep_causal_conv(void *out, const void *x, const float *weight, void *conv,
                          void *snapshots, const int64_t *slots, const int32_t *cu_rows,
                          const int32_t *start, const int32_t *pending, const int32_t *window,
                          const int32_t *snapshot_after, const int32_t *snapshot_line, long rows,
                          long x_stride, long channels, long taps, long lines, int dtype)
{
    assert(taps <= MAX_TAPS && channels % 8 == 0);
    conv_job j = {{rows, slots, cu_rows, start, pending, window, snapshot_after, snapshot_line},
                  out, conv, snapshots, x, weight, x_stride, channels, taps, lines,
                  (channels + COLUMNS - 1) / COLUMNS, dtype};
    parallel_for(conv_task, &j, rows * j.channel_tasks);
}
