#include "step.h"

static void gather_token(const token_inputs *out, const token_runs *r, const slot_state *state,
                         int32_t *error, long t, long num_tokens, long shift, const table_sizes *s)
{
    const long row = r->token_row[t], offset = t - r->cu_rows[row], slot = r->slots[row];
    const int real = offset < r->valid[row];
    int64_t position = (int64_t)r->start[row] + offset, page = position / s->block_size;
    int inside = position >= 0 && position + shift < s->width && page < s->pages;
    if (!inside) position = page = 0;
    const int32_t *entry = state->block_tables + slot * s->pages + page;
    const long table = s->lines * s->pages; /* of a KV group */
    for (long g = 0; g < s->groups; g++)
        inside = inside && entry[g * table] >= 0 && entry[g * table] < s->num_blocks;
    if (real && !inside) *error |= OUT_OF_BOUNDS;
    const int usable = real && inside;
    out->token_ids[t] = usable ? state->tokens[slot * s->width + position + shift] : 0;
    out->positions[t] = position;
    for (long g = 0; g < s->groups; g++) {
        const int64_t block = usable ? entry[g * table] : NULL_BLOCK;
        out->kv_slots[g * num_tokens + t] = block * s->block_size + position % s->block_size;
    }
}

void surestep_gather_tokens(const token_inputs *out, const token_runs *runs,
                            const slot_state *state, int32_t *error, long num_tokens, long shift,
                            const table_sizes *sizes)
{
    for (long t = 0; t < num_tokens; t++)
        gather_token(out, runs, state, error, t, num_tokens, shift, sizes);
}
