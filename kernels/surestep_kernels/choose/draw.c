/* Draws from a row of logits without sorting it: min_p, top_k, top_p, then the Gumbel-max trick.
 *
 * top_k: the greatest logits of many small groups tell how far its tokens reach. Tokens within that
 * distance are listed, few more than k, and the kth of them is selected.
 *
 * top_p needs no order at all. The winner among all tokens also wins among those of the nucleus if
 * it is one of them; so the winner is drawn first, and the mass in front of it is compared with the
 * mass of the nucleus. If it is too great, the nucleus lies in front of that token, and the next
 * winner is drawn from there: 1 + ln(1 / p) draws on average.
 */
#include "draw.h"

#include <stdlib.h>

typedef struct {
    float score;
    place at;
} winner;

INLINE void consider(winner *best, place at, int32_t hash)
{
    float score = -at.gap + noise_of(hash);
    if (score > best->score || (score == best->score && at.id < best->at.id))
        *best = (winner){score, at};
}

/* The best score of those in front of `end`, the lowest id of equals; `greedy` has gap 0. */
static winner draw_before(const tokens *t, int32_t greedy, noise_key key, place end)
{
    winner best = {-INFINITY, {INFINITY, 0}};
    const place first = {0, greedy};
    if (in_front(first, end)) consider(&best, first, hash8((i8x){greedy}, key)[0]);
    float distance = distance_of(t, fminf(end.gap, MOST_NOISE - best.score));
    FOR_NEAR(i, t, distance) {
        f8 gap = gap8(t, i);
        i8x ids = ids8(t, i), hash = hash8(ids, key);
        i8x may = in_front8(gap, ids, end) & may_reach8(hash, gap, best.score);
        if (!any8(may)) continue;
        for (int lane = 0; lane < 8; lane++)
            if (may[lane]) consider(&best, (place){gap[lane], ids[lane]}, hash[lane]);
        distance = distance_of(t, fminf(end.gap, MOST_NOISE - best.score));
    }
    return best;
}

/* ---- top_p ---- */

enum { UNIT_BITS = 40, MANTISSA_BITS = 24 };
static const float FARTHEST = 29.0f; /* gaps from here on have no mass */

typedef int32_t i4x __attribute__((vector_size(16)));
typedef uint64_t ul4 __attribute__((vector_size(32)));

INLINE ul4 shifted4(i8x whole, i8x n, int half)
{
    i4x w, by;
    memcpy(&w, (char *)&whole + half * sizeof w, sizeof w);
    memcpy(&by, (char *)&n + half * sizeof by, sizeof by);
    return (__builtin_convertvector(w, ul4) << (UNIT_BITS - MANTISSA_BITS))
           >> __builtin_convertvector(by, ul4);
}

/* The mass of 8 gaps, added up in 4 lanes: the operations of surestep_kernels/choose/mass.py. */
INLINE ul4 mass8(f8 gap, i8x counted)
{
    const float rounds = 12582912.0f; /* 1.5 * 2^23 */
    gap = select8(gap < FARTHEST, gap, splat8(FARTHEST));
    f8 n = (gap * LOG2_E + rounds) - rounds;
    f8 x = (n * 0.693359375f - gap) + n * -2.12194440e-4f;
    f8 y = x * 1.9875691500e-4f;
    y = (y + 1.3981999507e-3f) * x;
    y = (y + 8.3334519073e-3f) * x;
    y = (y + 4.1665795894e-2f) * x;
    y = (y + 1.6666665459e-1f) * x;
    y = (y + 5.0000001201e-1f) * (x * x) + x + 1.0f;
    i8x whole = __builtin_convertvector(y * (float)(1 << MANTISSA_BITS), i8x) & counted;
    i8x shift = __builtin_convertvector(n, i8x);
    return shifted4(whole, shift, 0) + shifted4(whole, shift, 1);
}

static int64_t mass_before(const tokens *t, place end)
{
    const float distance = distance_of(t, fminf(end.gap, FARTHEST));
    ul4 sum = {0};
    FOR_NEAR(i, t, distance) {
        f8 gap = gap8(t, i);
        sum += mass8(gap, in_front8(gap, ids8(t, i), end));
    }
    return (int64_t)(sum[0] + sum[1] + sum[2] + sum[3]);
}

/* A token is in the nucleus when the mass in front of it is below this. */
static int64_t target_mass(float top_p, int64_t total)
{
    double target = ceil((double)top_p * (double)total);
    return (int64_t)(target < 0x1p62 ? target : 0x1p62);
}

static int32_t draw_nucleus(const tokens *t, int32_t greedy, noise_key key, place end, float top_p)
{
    winner best = draw_before(t, greedy, key, end);
    if (top_p == INFINITY) return best.at.id;
    const int64_t target = target_mass(top_p, mass_before(t, end));
    while (mass_before(t, best.at) >= target) best = draw_before(t, greedy, key, best.at);
    return best.at.id;
}

/* ---- top_k ---- */

typedef struct {
    uint64_t *keys;  /* each [n + 8] */
    float *z;
    int32_t *ids;
} scratch;

/* Gap and id in one number, which orders like them: floats that are not negative are in the order
 * of their bits. */
INLINE uint64_t key_at(float gap, int32_t id)
{
    uint32_t bits;
    memcpy(&bits, &gap, sizeof bits);
    return (uint64_t)bits << 32 | (uint32_t)id;
}

INLINE place place_of(uint64_t key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    place at = {0, (int32_t)(uint32_t)key};
    memcpy(&at.gap, &bits, sizeof bits);
    return at;
}

/* The kth smallest key, k from 1 to n, byte by byte; leaves the keys in no order. */
static uint64_t select_key(uint64_t *keys, long n, long k)
{
    for (int shift = 56; n > 1 && shift >= 0; shift -= 8) {
        long counts[256] = {0}, kept = 0;
        int byte = 0;
        for (long i = 0; i < n; i++) counts[keys[i] >> shift & 255]++;
        while (k > counts[byte]) k -= counts[byte++];
        for (long i = 0; i < n; i++)
            if ((int)(keys[i] >> shift & 255) == byte) keys[kept++] = keys[i];
        n = kept;
    }
    return keys[0];
}

/* A gap within which at least k tokens lie, and few more: the kth of those of the best tokens
 * of groups, of which there are about 8 k. */
static float gap_of_head(const tokens *t, long k, uint64_t *keys)
{
    const long group = t->n / (8 * k) < 1 ? 1 : t->n / (8 * k);
    long n = 0;
    for (long i = 0; i < t->n; i += 8 * group) {
        f8 z = splat8(-INFINITY);
        for (long j = i; j < i + 8 * group && j < t->n; j += 8) z = max8(z, logits8(t, j));
        f8 gap = (t->peak - z) / t->temperature;
        for (int lane = 0; lane < 8; lane++) keys[n++] = key_at(gap[lane], 0);
    }
    return place_of(select_key(keys, n, k)).gap;
}

/* List the tokens in front of `end` that top_k may keep, and move `end` to its limit. */
static tokens head_of(const tokens *t, long k, place *end, scratch s)
{
    const float near = fminf(gap_of_head(t, k, s.keys), end->gap);
    const float distance = distance_of(t, near);
    tokens head = {s.z, s.ids, 0, t->peak, t->temperature};
    FOR_NEAR(i, t, distance) {
        f8 gap = gap8(t, i);
        i8x hit = gap <= near;
        if (!any8(hit)) continue;
        for (int lane = 0; lane < 8 && i + lane < t->n; lane++) {
            if (!hit[lane]) continue;
            s.keys[head.n] = key_at(gap[lane], (int32_t)i + lane);
            s.z[head.n] = t->z[i + lane];
            s.ids[head.n++] = (int32_t)i + lane;
        }
    }
    if (head.n >= k) {
        *end = place_of(select_key(s.keys, head.n, k));
        end->id++;
    }
    for (; head.n % 8; head.n++) {
        s.z[head.n] = -INFINITY;
        s.ids[head.n] = INT32_MAX;
    }
    return head;
}

int32_t draw_token(const tokens *t, int32_t greedy, noise_key key, const restriction *r)
{
    if (!r) return draw_before(t, greedy, key, (place){INFINITY, INT32_MAX}).at.id;
    place end = {r->max_gap, INT32_MAX};
    if (r->top_k >= t->n) return draw_nucleus(t, greedy, key, end, r->top_p);
    const size_t room = (size_t)t->n + 8;
    scratch s = {malloc(room * (sizeof *s.keys + sizeof *s.z + sizeof *s.ids)), NULL, NULL};
    if (!s.keys) return -1;
    s.z = (float *)(s.keys + room);
    s.ids = (int32_t *)(s.z + room);
    tokens head = head_of(t, r->top_k, &end, s);
    int32_t id = draw_nucleus(&head, greedy, key, end, r->top_p);
    free(s.keys);
    return id;
}
