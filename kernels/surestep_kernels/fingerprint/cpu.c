/* The sum of all bits of a step's hidden states: see surestep_kernels/fingerprint/reference.py. */
#include <stdint.h>

/* Sums of whole numbers have no order: the compiler may vectorise as it likes. */
#define DEFINE_SUM(name, element) \
    static int64_t name(const element *x, long n) \
    { \
        int64_t sums[16] = {0}, sum = 0; \
        long i = 0; \
        for (; i + 16 <= n; i += 16) \
            for (int lane = 0; lane < 16; lane++) sums[lane] += x[i + lane]; \
        for (; i < n; i++) sum += x[i]; \
        for (int lane = 0; lane < 16; lane++) sum += sums[lane]; \
        return sum; \
    }

DEFINE_SUM(sum16, int16_t)
DEFINE_SUM(sum32, int32_t)

/* Sum of the bit patterns of hidden [rows, width]; of the first num_positions of them, those whose
 * offset is below valid of their row alone. */
int64_t surestep_fingerprint(const void *hidden, const int32_t *position_row,
                             const int32_t *position_offset, const int32_t *valid, long rows,
                             long num_positions, long width, int element_size)
{
    uint64_t total = 0;
    for (long n = 0; n < rows; n++) {
        if (n < num_positions && position_offset[n] >= valid[position_row[n]]) continue;
        const char *x = (const char *)hidden + n * width * element_size;
        total += (uint64_t)(element_size == 2 ? sum16((const int16_t *)x, width)
                                              : sum32((const int32_t *)x, width));
    }
    return (int64_t)total;
}
