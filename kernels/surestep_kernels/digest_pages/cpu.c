/* Digests of pages: see surestep_kernels/digest_pages/reference.py. */
#include <stdint.h>
#include <string.h>

#include "pool.h"

typedef uint64_t words __attribute__((vector_size(64))); /* of the eight lanes */

typedef struct {
    int64_t *digests;
    const int64_t *lines;
    const char *const *pages;
    const int64_t *sizes;
    long num_pages;
} digest_job;

static void digest_task(const void *job, long index)
{
    const digest_job *j = job;
    words sums = {0}, behind = {0};
    for (long page = 0; page < j->num_pages; page++) {
        const long size = j->sizes[page];
        const char *x = j->pages[page] + j->lines[index] * size;
        long i = 0;
        for (; i + (long)sizeof(words) <= size; i += sizeof(words)) {
            words row;
            memcpy(&row, x + i, sizeof row);
            sums += row;
            behind += sums;
        }
        if (i < size) {
            words row = {0};
            memcpy(&row, x + i, size - i);
            sums += row;
            behind += sums;
        }
    }
    uint64_t digest = j->lines[index];
    for (int lane = 0; lane < 16; lane++) {
        digest = (digest ^ (lane < 8 ? sums[lane] : behind[lane - 8])) * 0x9E3779B97F4A7C15;
        digest ^= digest >> 32;
    }
    j->digests[index] = digest;
}

/* Digests [num_lines] of lines of all pages [num_pages], which have sizes bytes a line. */
void surestep_digest_pages(int64_t *digests, const int64_t *lines, const char *const *pages,
                           const int64_t *sizes, long num_lines, long num_pages)
{
    const digest_job j = {digests, lines, pages, sizes, num_pages};
    parallel_for(digest_task, &j, num_lines);
}
