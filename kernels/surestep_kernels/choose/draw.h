#pragma once

#include "gumbel.h"
#include "tokens.h"

typedef struct {
    float max_gap; /* infinite = off */
    long top_k;    /* at least 1; the number of tokens = off */
    float top_p;   /* infinite = off */
} restriction;

/* Draw one of the tokens, as choose_reference does. `greedy` is a token with the greatest logit, r
 * NULL where nothing is restricted. Returns -1 when there is no memory. */
int32_t draw_token(const tokens *t, int32_t greedy, noise_key key, const restriction *r);
