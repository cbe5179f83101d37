/* Prompt lookup: see surestep_kernels/ngram/reference.py. */
#include "pool.h"
#include "tokens.h"

enum { FEW_ROWS = 32 }; /* take less time than waking a helper, each a few microseconds */

typedef struct {
    int32_t *ids, *counts; /* [rows, num_drafts], [rows] */
    const int32_t *tokens; /* [lines, width] */
    const int32_t *slots, *lengths, *max_drafts;
    long lines, width, num_drafts, max_n, min_n;
    const int32_t *recent, *recent_lengths, *recent_line; /* [.., recent_width], [..], [rows] */
    long recent_width, recent_min_n;
} ngram_job;

/* Where a text goes on, and after how many tokens that are the row's last ones. */
typedef struct {
    long end, n; /* index of the last of them */
} match;

/* How many tokens up to text[end] equal those up to row[last], max_n at most. */
static long match_length(const int32_t *text, long end, const int32_t *row, long last, long max_n)
{
    const long most = max_n < last + 1 ? max_n : last + 1;
    long n = 0;
    while (n < most && n <= end && text[end - n] == row[last - n]) n++;
    return n;
}

/* Whether any of 8 tokens is this one. */
static int has_token(const int32_t *tokens, int32_t id)
{
    i8x x;
    memcpy(&x, tokens, sizeof x);
    return any8(x == id);
}

/* The latest of the longest matches in a text, of at least min_n tokens; n is 0 without one. */
static match best_match(const int32_t *text, long length, const int32_t *row, long last,
                        long max_n, long min_n)
{
    match best = {-1, min_n - 1};
    for (long end = length - 2; end >= 0 && best.n < max_n; end--) {
        while (end >= 7 && !has_token(text + end - 7, row[last])) end -= 8;
        if (end < 0) break;
        const long n = match_length(text, end, row, last, max_n);
        if (n > best.n && text[end + 1] >= 0) best = (match){end, n};
    }
    if (best.end < 0) best.n = 0;
    return best;
}

/* Draft what stands behind a match of its own text, and again from there. */
static long copy_own(int32_t *ids, const int32_t *row, match found, long known, long most)
{
    const long period = known - 1 - found.end;
    for (long i = 0; i < most; i++) ids[i] = row[found.end + 1 + i % period];
    return most;
}

/* Draft what stands behind a match of another text, up to that text's end. */
static long copy_other(int32_t *ids, const int32_t *text, match found, long length, long most)
{
    long count = 0;
    for (long at = found.end + 1; count < most && at < length && text[at] >= 0; at++)
        ids[count++] = text[at];
    return count;
}

static void ngram_task(const void *job, long r)
{
    const ngram_job *j = job;
    const long slot = j->slots[r], known = j->lengths[r] < j->width ? j->lengths[r] : j->width;
    const long most = j->max_drafts[r] < j->num_drafts ? j->max_drafts[r] : j->num_drafts;
    int32_t *ids = j->ids + r * j->num_drafts;
    memset(ids, 0, j->num_drafts * sizeof *ids);
    j->counts[r] = 0;
    if (slot < 0 || slot >= j->lines || known < 1 || most < 1) return;
    const int32_t *row = j->tokens + slot * j->width;
    const match own = best_match(row, known, row, known - 1, j->max_n, j->min_n);
    const long line = j->recent_line[r];
    if (line >= 0 && own.n < j->max_n) {
        const int32_t *text = j->recent + line * j->recent_width;
        const long length = j->recent_lengths[line];
        const long least = own.n + 1 > j->recent_min_n ? own.n + 1 : j->recent_min_n;
        const match other = best_match(text, length, row, known - 1, j->max_n, least);
        if (other.n) {
            j->counts[r] = copy_other(ids, text, other, length, most);
            return;
        }
    }
    if (own.n) j->counts[r] = copy_own(ids, row, own, known, most);
}

/* A row of a slot that does not exist gets no drafts, one with recent_line -1 none of others. */
void surestep_ngram(int32_t *ids, int32_t *counts, const int32_t *tokens, const int32_t *slots,
                    const int32_t *lengths, const int32_t *max_drafts, const int32_t *recent,
                    const int32_t *recent_lengths, const int32_t *recent_line, long rows,
                    long lines, long width, long num_drafts, long max_n, long min_n,
                    long recent_width, long recent_min_n)
{
    const ngram_job j = {ids, counts, tokens, slots, lengths, max_drafts,
                         lines, width, num_drafts, max_n, min_n,
                         recent, recent_lengths, recent_line, recent_width, recent_min_n};
    if (rows <= FEW_ROWS)
        for (long r = 0; r < rows; r++) ngram_task(&j, r);
    else
        parallel_for(ngram_task, &j, rows);
}
