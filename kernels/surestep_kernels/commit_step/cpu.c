#include "step.h"

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
