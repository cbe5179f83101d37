/* The changes of logits that requests specify: see surestep_kernels/shape_logits/reference.py.
 *
 * Only rows whose requests specify changes are touched. A logit that is NaN or +inf stays unusable,
 * and one that was finite becomes SATURATED at most.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "pool.h"
#include "vec.h"

static const float SATURATED = 3.40282346638528859812e38f;

typedef struct {
    const int32_t *window, *slot, *length, *tokens;
    long width; /* of a line of tokens */
} positions;

typedef struct {
    const int32_t *which, *cu, *ids;
    const float *values;
    const int32_t *only;
} biases;

typedef struct {
    const int32_t *which, *prompt_len;
    const float *repetition, *presence, *frequency;
} penalties;

typedef struct {
    const int32_t *which, *cu, *cu_ids, *ids, *until, *first;
} forbidden;

typedef struct {
    const int32_t *which, *words;
} masks;

typedef struct {
    float *z; /* [rows, vocab] */
    long vocab;
    const positions *at;
    const void *asked; /* biases, penalties, forbidden or masks */
    _Atomic int *failed;
} shape_job;

static float unless_unusable(float new, float old)
{
    if (old != old || old == INFINITY) return NAN;
    return new < SATURATED ? new : SATURATED;
}

static void *scratch(const shape_job *j, size_t count, size_t size)
{
    void *room = calloc(count, size);
    if (!room) atomic_store(j->failed, 1);
    return room;
}

/* ---- biases ---- */

static void forbid_all(float *z, long n)
{
    long i = 0;
    for (; i + 8 <= n; i += 8) {
        f8 old = load8(z, i, F32);
        store8(z, i, select8((old != old) | (old == INFINITY), splat8(NAN), splat8(-INFINITY)), F32);
    }
    for (; i < n; i++) z[i] = unless_unusable(-INFINITY, z[i]);
}

static void bias_task(const void *job, long index)
{
    const shape_job *j = job;
    const biases *b = j->asked;
    const long row = b->which[index], w = j->at->window[row];
    const int32_t *ids = b->ids + b->cu[w];
    const float *values = b->values + b->cu[w];
    const long count = b->cu[w + 1] - b->cu[w];
    float *z = j->z + row * j->vocab, *biased = scratch(j, (size_t)count + 1, sizeof *biased);
    if (!biased) return;
    for (long i = 0; i < count; i++)
        biased[i] = unless_unusable(z[ids[i]] + values[i], z[ids[i]]);
    if (b->only[w]) forbid_all(z, j->vocab);
    for (long i = 0; i < count; i++) z[ids[i]] = biased[i];
    free(biased);
}

/* ---- penalties ---- */

typedef struct {
    int32_t token; /* 1 + id; 0: empty */
    int32_t count; /* in the output */
} seen;

/* Tokens of a history, each once, in a table with room for twice as many as there are. */
static void count_token(seen *table, int bits, int32_t id, int in_output)
{
    const uint32_t mask = (1u << bits) - 1;
    uint32_t at = (uint32_t)id * 2654435769u >> (32 - bits);
    while (table[at].token && table[at].token != id + 1) at = (at + 1) & mask;
    table[at].token = id + 1;
    table[at].count += in_output;
}

static float penalised(const penalties *p, long w, float z, int32_t count)
{
    float new = z > 0 ? z / p->repetition[w] : z * p->repetition[w];
    new -= p->frequency[w] * (float)count;
    new -= p->presence[w] * (float)(count > 0);
    return unless_unusable(new, z);
}

static void penalise_task(const void *job, long index)
{
    const shape_job *j = job;
    const penalties *p = j->asked;
    const long row = p->which[index], w = j->at->window[row], length = j->at->length[row];
    const int32_t *history = j->at->tokens + j->at->slot[row] * j->at->width;
    int bits = 1;
    while (1L << bits < 2 * length) bits++;
    seen *table = scratch(j, 1ul << bits, sizeof *table);
    if (!table) return;
    for (long i = 0; i < length && i < j->at->width; i++) {
        const int exists = history[i] >= 0 && history[i] < j->vocab; /* else it belongs to padding */
        count_token(table, bits, exists ? history[i] : 0, i >= p->prompt_len[w]);
    }
    float *z = j->z + row * j->vocab;
    for (long i = 0; i < 1L << bits; i++) {
        const long id = table[i].token - 1;
        if (id >= 0) z[id] = penalised(p, w, z[id], table[i].count);
    }
    free(table);
}

/* ---- forbidden sequences ---- */

/* Whether all but the last token of sequence i end the history. */
static int lacks_the_last(const forbidden *f, long i, const int32_t *history, long first,
                          long length)
{
    const long begin = f->cu_ids[i], prefix = f->cu_ids[i + 1] - begin - 1;
    if (prefix > (length > first ? length - first : 0)) return 0;
    return prefix == 0
           || memcmp(history + length - prefix, f->ids + begin, (size_t)prefix * 4) == 0;
}

static void forbid_task(const void *job, long index)
{
    const shape_job *j = job;
    const forbidden *f = j->asked;
    const long row = f->which[index], w = j->at->window[row], length = j->at->length[row];
    const int32_t *history = j->at->tokens + j->at->slot[row] * j->at->width;
    float *z = j->z + row * j->vocab;
    for (long i = f->cu[w]; i < f->cu[w + 1]; i++) {
        const long last = f->ids[f->cu_ids[i + 1] - 1];
        if (length < f->until[i] && lacks_the_last(f, i, history, f->first[w], length))
            z[last] = unless_unusable(-INFINITY, z[last]);
    }
}

/* ---- masks ---- */

static void mask_task(const void *job, long index)
{
    const shape_job *j = job;
    const masks *m = j->asked;
    const long num_words = (j->vocab + 31) / 32;
    const int32_t *words = m->words + index * num_words;
    float *z = j->z + m->which[index] * j->vocab;
    for (long w = 0; w < num_words; w++) {
        const uint32_t word = (uint32_t)words[w];
        const long first = 32 * w, end = first + 32 < j->vocab ? first + 32 : j->vocab;
        if (!word) forbid_all(z + first, end - first);
        else if (word != UINT32_MAX)
            for (long i = first; i < end; i++)
                if (!(word >> (i - first) & 1)) z[i] = unless_unusable(-INFINITY, z[i]);
    }
}

static int shape(task_fn task, float *z, long vocab, const positions *at, const void *asked,
                 long count)
{
    _Atomic int failed = 0;
    const shape_job j = {z, vocab, at, asked, &failed};
    parallel_for(task, &j, count);
    return !atomic_load(&failed);
}

/* Each shapes `count` rows of z [rows, vocab]; returns 0 if there was no memory. */

int surestep_bias(float *z, long vocab, const positions *at, const biases *asked, long count)
{
    return shape(bias_task, z, vocab, at, asked, count);
}

int surestep_penalise(float *z, long vocab, const positions *at, const penalties *asked, long count)
{
    return shape(penalise_task, z, vocab, at, asked, count);
}

int surestep_forbid(float *z, long vocab, const positions *at, const forbidden *asked, long count)
{
    return shape(forbid_task, z, vocab, at, asked, count);
}

int surestep_mask(float *z, long vocab, const positions *at, const masks *asked, long count)
{
    return shape(mask_task, z, vocab, at, asked, count);
}
