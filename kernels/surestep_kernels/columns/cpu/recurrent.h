/* The recurrent half of a gated delta layer (Yang et al., 2024): the causal convolution in front of
 * it and the delta rule itself, for a ragged batch whose rows own slots of state.
 *
 * A row first lets its slot's state advance over the `pending` recorded tokens that were accepted
 * (fold), then runs its own tokens. Tokens of prompts advance the state at once; tokens of windows
 * are only recorded, because they may turn out to be rejected drafts. Every token goes through the
 * same arithmetic in the same order wherever it is, so that state and output are bit for bit
 * those of one token at a time. A row that starts its sequence starts from zero, whatever the slot
 * holds.
 */
#pragma once

#include <assert.h>

#include "pool.h"
#include "vec.h"

enum { COLUMNS = 32, VECTORS = COLUMNS / 8, MAX_KEY_DIM = 256, MAX_TAPS = 8 };

typedef struct {
    long rows;
    const int64_t *slots;
    const int32_t *cu_rows, *start, *pending, *window, *snapshot_after, *snapshot_line;
} ragged;
