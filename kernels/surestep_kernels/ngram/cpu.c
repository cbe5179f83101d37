/* Prompt lookup: see surestep_kernels/ngram/reference.py. */
#include "pool.h"
#include "tokens.h"

typedef struct {
    int32_t *ids, *counts; /* [rows, num_drafts], [rows] */
    const int32_t *tokens; /* [lines, width] */
    const int32_t *slots, *lengths, *max_drafts;
    long lines, width, num_drafts, max_n, min_n;
} ngram_job;

/* How many tokens up to `end` equal those up to `last`, max_n at most. */
static long match_length(const int32_t *row, long end, long last, long max_n)
{
    long n = 0;
    while (n < max_n && n <= end && row[end - n] == row[last - n]) n++;
    return n;
}

/* Whether any of 8 tokens is this one. */
static int has_token(const int32_t *tokens, int32_t id)
{
    i8x x;
    memcpy(&x, tokens, sizeof x);
    return any8(x == id);
}

/* Index of the last token of the most recent of the longest matches, -1 without one. */
static long best_match(const int32_t *row, long length, const ngram_job *j)
{
    const long last = length - 1;
    long best = -1, best_n = j->min_n - 1;
    for (long end = last - 1; end >= 0 && best_n < j->max_n; end--) {
        while (end >= 7 && !has_token(row + end - 7, row[last])) end -= 8;
        if (end < 0) break;
        long n = match_length(row, end, last, j->max_n);
        if (n > best_n) {
            best = end;
            best_n = n;
        }
    }
    return best;
}

static void ngram_task(const void *job, long r)
{
    const ngram_job *j = job;
    const long slot = j->slots[r], known = j->lengths[r] < j->width ? j->lengths[r] : j->width;
    const int exists = slot >= 0 && slot < j->lines;
    const int32_t *row = j->tokens + (exists ? slot : 0) * j->width;
    const long end = exists ? best_match(row, known, j) : -1;
    const long period = known - 1 - end;
    const long most = j->max_drafts[r] < j->num_drafts ? j->max_drafts[r] : j->num_drafts;
    const long count = end < 0 ? 0 : most;
    for (long i = 0; i < j->num_drafts; i++)
        j->ids[r * j->num_drafts + i] = i < count ? row[end + 1 + i % period] : 0;
    j->counts[r] = count;
}

/* A row of a slot that does not exist gets no drafts. */
void surestep_ngram(int32_t *ids, int32_t *counts, const int32_t *tokens, const int32_t *slots,
                    const int32_t *lengths, const int32_t *max_drafts, long rows, long lines,
                    long width, long num_drafts, long max_n, long min_n)
{
    const ngram_job j = {ids, counts, tokens, slots, lengths, max_drafts,
                         lines, width, num_drafts, max_n, min_n};
    parallel_for(ngram_task, &j, rows);
}
