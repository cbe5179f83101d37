#include <stdint.h>
#include <string.h>

void surestep_write_runs(int32_t *memory, const int32_t *to, const int32_t *cu,
                         const int32_t *words, long runs)
{
    for (long g = 0; g < runs; g++)
        memcpy(memory + to[g], words + cu[g], (size_t)(cu[g + 1] - cu[g]) * sizeof *words);
}
