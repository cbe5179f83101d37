/* Keys and values of tokens to their places in the paged cache. */
#include "ops.h"
#include "rows.h"

typedef struct {
    row_range range; /* width: elements of the k of a token */
    const void *k, *v;
    const int64_t *slots;
    long k_stride, v_stride, heads, head_dim, block_size;
    cache_pages pages;
} store_job;

/* Elements of a head in the type of the pages, which is another one than their own. */
INLINE void encode(uint8_t *out, const void *from, long dims, float scale, const int dtype)
{
    for (long d = 0; d < dims; d += 8) {
        u8x codes = encode8(load8(from, d, dtype) / scale);
        for (int i = 0; i < 8; i++) out[d + i] = (uint8_t)codes[i];
    }
}

/* The codes of a head in I8, to nearest, halves to even; returns their scale, NaN where an element
 * is not finite. */
INLINE float encode_int8(uint8_t *out, const void *from, long dims, const int dtype)
{
    u8x most = {0};
    for (long d = 0; d < dims; d += 8) {
        u8x size = (u8x)load8(from, d, dtype) & 0x7fffffff, more = (u8x)(size > most);
        most = (size & more) | (most & ~more);
    }
    for (int i = 1; i < 8; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    if (most[0] >= 0x7f800000) {
        memset(out, 0, MAX_HEAD_DIM);
        return NAN;
    }
    const float scale = ((f8)most)[0] / 127.0f, unit = scale > 0 ? scale : 1.0f;
    for (long d = 0; d < dims; d += 8) {
        f8 x = load8(from, d, dtype) / unit; /* above 127 where the scale is subnormal */
        x = select8(x > 127.0f, splat8(127.0f), x);
        x = select8(x < -127.0f, splat8(-127.0f), x);
        u8x codes = (u8x)(x + 12582912.0f); /* 1.5 * 2^23: the lowest byte is the integer's */
        for (int i = 0; i < 8; i++) out[d + i] = (uint8_t)codes[i];
    }
    return scale;
}

INLINE void store_head(const store_job *j, long head, long offset, const char *k, const char *v,
                       const int dtype)
{
    const long size = element_size(dtype), dims = j->head_dim;
    char *key = (char *)j->pages.k + (head + offset) * size;
    for (long d = 0; d < dims; d++) memcpy(key + d * j->block_size * size, k + d * size, (size_t)size);
    memcpy((char *)j->pages.v + (head + offset * dims) * size, v, (size_t)(dims * size));
}

INLINE void store_int8(const store_job *j, long head, long offset, const void *k, const void *v,
                       const int dtype)
{
    uint8_t codes[2][MAX_HEAD_DIM];
    const long at = head + j->head_dim * j->block_size + offset * (long)sizeof(float);
    const float key_scale = encode_int8(codes[0], k, j->head_dim, dtype);
    const float value_scale = encode_int8(codes[1], v, j->head_dim, dtype);
    store_head(j, head, offset, (char *)codes[0], (char *)codes[1], I8);
    memcpy((char *)j->pages.k + at, &key_scale, sizeof key_scale);
    memcpy((char *)j->pages.v + at, &value_scale, sizeof value_scale);
}

/* Keys lie transposed in a block, [head][dim][offset]: attention multiplies one dim of a query
 * with many positions at once. Values lie [head][offset][dim]. */
INLINE void store_row(const store_job *j, long row, const int dtype)
{
    const long block = j->slots[row] / j->block_size, offset = j->slots[row] % j->block_size;
    const long dims = j->head_dim;
    for (long h = 0; h < j->heads; h++) {
        const long head = (block * j->heads + h) * head_elements(&j->pages, dims, j->block_size);
        const void *k = element(j->k, row * j->k_stride + h * dims, dtype);
        const void *v = element(j->v, row * j->v_stride + h * dims, dtype);
        uint8_t codes[2][MAX_HEAD_DIM];
        if (j->pages.dtype == I8) {
            store_int8(j, head, offset, k, v, dtype);
            continue;
        }
        if (j->pages.dtype != E4M3) {
            store_head(j, head, offset, k, v, dtype);
            continue;
        }
        encode(codes[0], k, dims, j->pages.k_scale, dtype);
        encode(codes[1], v, dims, j->pages.v_scale, dtype);
        store_head(j, head, offset, (char *)codes[0], (char *)codes[1], E4M3);
    }
}

static void store_task(const void *job, long index)
{
    const store_job *j = job;
    FOR_ROWS(row, j->range, index) BY_DTYPE(j->range.dtype, store_row, j, row);
}

/* k and v [rows, heads, head_dim] to their slots; strides in elements. */
void surestep_store_kv(const cache_pages *pages, const void *k, const void *v, const int64_t *slots,
                       long rows, long k_stride, long v_stride, long heads, long head_dim,
                       long block_size, int dtype)
{
    store_job j = {make_range(rows, heads * head_dim, dtype), k, v, slots, k_stride, v_stride, heads,
                   head_dim, block_size, *pages};
    run_rows(store_task, &j, &j.range);
}
