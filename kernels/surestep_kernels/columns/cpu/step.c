/* The ops that look up and advance the slots of a step, named as in
 * surestep_kernels/slot_state.py. A slot, position or block that does not exist is replaced by
 * padding. */
#include <stdint.h>
#include <string.h>

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

static int64_t existing_slot(int64_t slot, const table_sizes *s)
{
    return slot < 0 || slot >= s->lines ? s->lines - 1 : slot;
}

/* ---- write_runs ---- */

void surestep_write_runs(int32_t *memory, const int32_t *to, const int32_t *cu,
                         const int32_t *words, long runs)
{
    for (long g = 0; g < runs; g++)
        memcpy(memory + to[g], words + cu[g], (size_t)(cu[g + 1] - cu[g]) * sizeof *words);
}

/* ---- gather_tokens ---- */

typedef struct {
    int64_t *token_ids, *positions, *kv_slots;
} token_inputs;

typedef struct {
    const int32_t *token_row, *cu_rows;
    const int64_t *slots;
    const int32_t *start, *valid;
} token_runs;

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

/* ---- gather_step ---- */

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

/* ---- commit_step ---- */

typedef struct {
    const int32_t *ids, *status; /* of each position */
} chosen;

typedef struct {
    const int32_t *cu, *ids;
} stop_ids;

typedef struct { /* a row's line of the report, without the tokens after it */
    int32_t len_before, n_drafts, status, n_accepted, n_emitted, folded, drafter_len;
} facts;

typedef struct {
    int32_t *report; /* [rows, facts and num_drafts + 1 tokens] */
    const step_rows *rows;
    const draft_ids *drafts;
    const chosen *chosen;
    const stop_ids *stops;
    const slot_state *state;
    long num_drafts;
    const table_sizes *sizes;
} commit_job;

static int is_stop(const stop_ids *stops, long window, int32_t token)
{
    for (long i = stops->cu[window]; i < stops->cu[window + 1]; i++)
        if (stops->ids[i] == token) return 1;
    return 0;
}

/* Fill in what a window emits, and copy the choices of all of its positions. */
static void judge(const commit_job *j, long row, long window, facts *f, int32_t *tokens)
{
    const long first = j->rows->cu_windows[window];
    const int32_t *drafts = j->drafts->ids + row * j->num_drafts;
    const long count = f->n_drafts < j->num_drafts ? f->n_drafts : j->num_drafts;
    memcpy(tokens, j->chosen->ids + first, (size_t)(count + 1) * sizeof *tokens);
    f->status = j->chosen->status[first];
    for (long i = 0; i <= count && j->chosen->status[first + i] == OK; i++) {
        const int equal = i < count && tokens[i] == drafts[i];
        const int stop = equal && is_stop(j->stops, window, tokens[i]);
        f->n_accepted = (int32_t)i + stop; /* the last token is a draft only if it is a stop id */
        f->n_emitted++;
        if (!equal || stop) break;
    }
}

static void commit_row(const commit_job *j, long row)
{
    const step_rows *rows = j->rows;
    const slot_state *state = j->state;
    const int64_t slot = existing_slot(rows->slot[row], j->sizes);
    const int real = slot < j->sizes->lines - 1;
    const int32_t start = state->committed[slot], known = state->known[slot];
    const int32_t count = rows->cu_rows[row + 1] - rows->cu_rows[row];
    const int32_t advances = real ? rows->advances[row] : 0;
    const int32_t upto = state->drafter_len[slot] + rows->catch_up[row];
    int32_t *line = j->report + row * ((long)(sizeof(facts) / sizeof *line) + j->num_drafts + 1);
    int32_t *tokens = line + sizeof(facts) / sizeof *line;
    facts f = {start, j->drafts->counts[row], OK, 0, 0, start + count * advances,
               upto < start ? upto : start};
    memset(tokens, 0, (size_t)(j->num_drafts + 1) * sizeof *tokens);
    if (real && rows->window[row] >= 0) judge(j, row, rows->window[row], &f, tokens);
    for (long i = 0; i < f.n_emitted; i++)
        if (known + i >= 0 && known + i < j->sizes->width)
            state->tokens[slot * j->sizes->width + known + i] = tokens[i];
    if (f.status == OK) state->committed[slot] = start + (advances > 0 ? count : f.n_emitted);
    state->known[slot] = known + f.n_emitted;
    state->folded[slot] = f.folded;
    state->drafter_len[slot] = f.drafter_len;
    memcpy(line, &f, sizeof f);
}

void surestep_commit_step(int32_t *report, const step_rows *rows, const draft_ids *drafts,
                          const chosen *chosen, const stop_ids *stops, const slot_state *state,
                          long num_rows, long num_drafts, const table_sizes *sizes)
{
    const commit_job j = {report, rows, drafts, chosen, stops, state, num_drafts, sizes};
    for (long row = 0; row < num_rows; row++) commit_row(&j, row);
}
