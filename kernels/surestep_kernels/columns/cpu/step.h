/* The ops that look up and advance the slots of a step, named as in
 * surestep_kernels/slot_state.py. A slot, position or block that does not exist is replaced by
 * padding. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "vec.h"

enum { NULL_BLOCK = 0, OUT_OF_BOUNDS = 1, OK = 1 }; /* slot_state.py; RowStatus */

typedef struct {
    int32_t *tokens, *block_tables, *committed, *known, *folded, *drafter_len;
} slot_state;

typedef struct {
    const int32_t *slot, *cu_rows, *advances, *snapshot_len, *snapshot_line, *chunked, *catch_up;
    const int32_t *window, *token_row, *position_row, *position_offset, *cu_windows;
} step_rows;

typedef struct {
    const int32_t *ids, *counts;
} draft_ids;

typedef struct {
    long lines, width, groups, pages, block_size, num_blocks;
} table_sizes;

INLINE int64_t existing_slot(int64_t slot, const table_sizes *s)
{
    return slot < 0 || slot >= s->lines ? s->lines - 1 : slot;
}

typedef struct {
    int64_t *token_ids, *positions, *kv_slots;
} token_inputs;

typedef struct {
    const int32_t *token_row, *cu_rows;
    const int64_t *slots;
    const int32_t *start, *valid;
} token_runs;

/* gather_tokens/cpu.c */
void surestep_gather_tokens(const token_inputs *out, const token_runs *runs,
                            const slot_state *state, int32_t *error, long num_tokens, long shift,
                            const table_sizes *sizes);
