/* Ops that other ops are made of. */
#pragma once

#include "vec.h"

/* linear/cpu.c */
void surestep_linear(void *y, const void *x, const void *w, const float *bias, long m, long n,
                     long k, long group, int format, int x_dtype, int y_dtype);

/* rms_norm, silu_and_mul and rotary */
void surestep_rms_norm(void *out, const void *x, void *residual, const float *weight, float eps,
                       long rows, long width, int dtype);
void surestep_silu_and_mul(void *out, const void *x, long rows, long width, int dtype);
void surestep_rotary(void *q, void *k, const int64_t *positions, const float *cos_sin, long rows,
                     long q_stride, long k_stride, long q_heads, long k_heads, long head_dim,
                     long rotary_dim, int dtype);

/* Of one layer, as store_kv/cpu.py fills it in: see LayerCache. */
typedef struct {
    void *k, *v;
    float k_scale, v_scale; /* of E4M3; others have 1 */
    int dtype;
} cache_pages;

/* Elements of a head in a block. Behind all codes of I8 lie their scales, f32[block_size]. */
INLINE long head_elements(const cache_pages *pages, long head_dim, long block_size)
{
    return (head_dim + (pages->dtype == I8 ? (long)sizeof(float) : 0)) * block_size;
}

enum { MAX_HEAD_DIM = 512 };

/* store_kv/cpu.c */
void surestep_store_kv(const cache_pages *pages, const void *k, const void *v, const int64_t *slots,
                       long rows, long k_stride, long v_stride, long heads, long head_dim,
                       long block_size, int dtype);

/* paged_attention/cpu.c */
void surestep_paged_attention(void *out, const void *q, const cache_pages *pages,
                              const int32_t *block_tables, const int64_t *slots,
                              const int32_t *cu_rows, const int32_t *start,
                              const int32_t *wider, const float *sinks,
                              long rows, long table_width, long q_stride, long kv_heads, long group,
                              long head_dim, long block_size, long window, float scale,
                              float softcap, int dtype);
