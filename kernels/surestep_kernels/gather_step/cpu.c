#include "step.h"

typedef struct {
    token_inputs tokens;
    int32_t *start, *valid;
    int64_t *slots;
    int32_t *pending, *snapshot_after, *lengths;
} step_inputs;

static void write_drafts(const draft_ids *drafts, const slot_state *state, long row, int64_t slot,
                         long num_drafts, const table_sizes *s)
{
    const int64_t known = state->known[slot];
    for (long i = 0; i < num_drafts && i < drafts->counts[row]; i++)
        if (known + i >= 0 && known + i < s->width)
            state->tokens[slot * s->width + known + i] = drafts->ids[row * num_drafts + i];
}

/* Tokens from the held state to the requested snapshot, if this row gets there; else 0. */
static int32_t snapshot_after(const step_rows *rows, long row, int32_t held, int32_t after)
{
    const int32_t target = rows->snapshot_len[row];
    return held < target && target <= after ? target - held : 0;
}

static void gather_row(const step_inputs *out, const step_rows *rows, const draft_ids *drafts,
                       const slot_state *state, int32_t *error, long row, long num_drafts,
                       const table_sizes *s)
{
    const int64_t slot = existing_slot(rows->slot[row], s);
    const int32_t start = state->committed[slot], held = state->folded[slot];
    const int32_t room = rows->cu_rows[row + 1] - rows->cu_rows[row];
    const int32_t valid = rows->advances[row] > 0 ? room : drafts->counts[row] + 1;
    if (slot != rows->slot[row]) *error |= OUT_OF_BOUNDS;
    write_drafts(drafts, state, row, slot, num_drafts, s);
    out->slots[row] = slot;
    out->start[row] = start;
    out->valid[row] = slot < s->lines - 1 ? valid : 0;
    out->pending[row] = start - held;
    out->snapshot_after[row] = snapshot_after(rows, row, held, start + room * rows->advances[row]);
}

/* R rows, T tokens and N positions are num_rows, num_tokens and num_positions. */
void surestep_gather_step(const step_inputs *out, const step_rows *rows, const draft_ids *drafts,
                          const slot_state *state, int32_t *error, long num_rows, long num_tokens,
                          long num_positions, long num_drafts, const table_sizes *sizes)
{
    for (long r = 0; r < num_rows; r++)
        gather_row(out, rows, drafts, state, error, r, num_drafts, sizes);
    const token_runs runs = {rows->token_row, rows->cu_rows, out->slots, out->start, out->valid};
    surestep_gather_tokens(&out->tokens, &runs, state, error, num_tokens, 0, sizes);
    for (long n = 0; n < num_positions; n++)
        out->lengths[n] = state->known[out->slots[rows->position_row[n]]]
                          + rows->position_offset[n];
}
