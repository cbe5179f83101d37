"""Draws from a part of the vocabulary, without sorting it: min_p, top_k and top_p as one limit.

Every rule keeps a leading part of the order "smallest gap first, then lowest id", so that what
remains is all tokens up to some key. Few tokens can be near the limit, so most rows are settled by
a list of them:

1. The pass for the maximum leaves the best token of each of 4096 groups, and the weight of each
   group in rows where top_p measures by all tokens (rest.py).
2. `choose_groups` finds how far candidates go. For top_k, k groups have a token within that gap;
   for top_p, the best tokens within it weigh more than the target; in any case, WANTED groups are
   enough. The groups with a candidate are recorded.
3. `_gather_kernel`, programs for the recorded groups: lists their candidates and weighs their other
   tokens.
4. `_settle_kernel`, a program per row: finds the limit in the list, two bits of it at a time, and
   draws. Where unlisted tokens could move the limit, they are measured exactly. If the list
   overflows, or does not reach the limit, the program searches the row itself, and the pass that
   draws from whole rows draws from this one.

The order of the list varies from run to run. Results do not depend on it: counts and masses are
whole numbers, weights never decide, and the draw is a maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .candidates import CandidateLists, gather, last_gap
from .limit import listed_limit, whole_limit
from .reference import DrawParams
from .rest import bounds, weighs_all
from .triton_gumbel import gumbel, row_key
from .triton_mass import mass_of, target_mass
from .vocab import GROUPS, append, best_of, id_bits_of

SHORT = 512  # candidates of most lists, which need an eighth of the registers
ROW_BLOCK = 4096  # tokens that a program processes at once when it searches a whole row
_ROW_WARPS = 16
_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_NEVER: tl.constexpr = tl.constexpr(9223372036854775807)
_LAST_FINITE: tl.constexpr = tl.constexpr(0x7F7FFFFF)
_BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def last_key(max_gap, id_bits):
    """Return the last key that min_p admits."""
    return ((max_gap.to(tl.int64) + 1) << id_bits) - 1


@triton.jit
def _settle_list(
    row,
    rows,
    params,
    lists,
    listed,
    drawn,
    sizes,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw from a list of up to SIZE candidates, if it contains everything that may be drawn.

    Returns whether it does, and the key of the last one. The kernel's arguments come in tuples.
    """
    z_ptr, peak_ptr, window_ptr, length_ptr = rows
    temperature_ptr, seed_low_ptr, seed_high_ptr, max_gap_ptr, top_k_ptr, top_p_ptr = params
    near_ptr, keys_ptr, chosen_ptr, rest_ptr, rests_ptr = lists
    value_ptr, id_ptr = drawn
    V, parts, id_bits = sizes
    window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + window), tl.load(top_p_ptr + window)
    max_gap = last_gap(max_gap_ptr, window)
    bound = last_key(max_gap, id_bits)
    place, part = tl.arange(0, SIZE), tl.arange(0, PARTS)
    keys = tl.load(keys_ptr + row * CAPACITY + place, mask=place < listed, other=_NEVER)
    bits = (keys >> id_bits).to(tl.int32)
    masses = mass_of(tl.where(place < listed, bits, _LAST_FINITE))
    complete = max_gap <= tl.load(near_ptr + row)
    enough = (top_k < V) & (listed >= top_k)
    least, most = bound * 0, bound * 0  # of the total mass for top_p
    if weighs_all(top_k_ptr, top_p_ptr, window, V):
        here = (part < parts) & (part * _GROUPS < tl.load(chosen_ptr + row))
        rests = tl.load(rests_ptr + row * parts + part, mask=here, other=0.0)
        least, most = bounds(tl.load(rest_ptr + row) + tl.sum(rests), V)
        mass = tl.sum(masses, axis=0)
        # What min_p keeps of groups without a candidate is not known.
        least = mass + tl.where(max_gap < _LAST_FINITE, 0, least)
        most += mass
        enough = mass >= target_mass(top_p, most)
    limit, settled = bound, complete | enough
    if settled:
        logits = z_ptr + row * V, V, peak, tl.load(temperature_ptr + window), id_bits
        limit = listed_limit(keys, masses, logits, bound, top_k, top_p, least, most, BLOCK)
        low, high = tl.load(seed_low_ptr + window), tl.load(seed_high_ptr + window)
        k0, k1 = row_key(low, high, tl.load(length_ptr + row))
        ids = (keys & (((bound * 0 + 1) << id_bits) - 1)).to(tl.int32)
        score = -bits.to(tl.float32, bitcast=True) + gumbel(ids, k0, k1)
        best, best_id = best_of(tl.where(keys <= limit, score, float("-inf")), ids)
        at, mask = row * parts + part, part < parts
        tl.store(value_ptr + at, tl.where(part == 0, best, float("-inf")), mask=mask)
        tl.store(id_ptr + at, tl.where(part == 0, best_id, _BEYOND), mask=mask)
    return settled, limit


@DependentKernel
@triton.jit
def _settle_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr,  # f32[N]
    window_ptr,  # i32[N]
    length_ptr,  # i32[N]
    temperature_ptr,  # and the other parameters: [V]
    seed_low_ptr,
    seed_high_ptr,
    max_gap_ptr,
    top_k_ptr,
    top_p_ptr,
    counts_ptr,  # and the other lists: see CandidateLists
    restricted_ptr,
    whole_ptr,
    limit_ptr,
    near_ptr,
    listed_ptr,
    keys_ptr,
    chosen_ptr,
    rest_ptr,
    rests_ptr,
    value_ptr,  # f32[N, parts]
    id_ptr,  # i32[N, parts]
    V,
    parts,
    id_bits,
    SHORT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    if tl.program_id(0) < tl.load(counts_ptr):
        row = tl.load(restricted_ptr + tl.program_id(0)).to(tl.int64)
        listed, window = tl.load(listed_ptr + row), tl.load(window_ptr + row)
        bound = last_key(last_gap(max_gap_ptr, window), id_bits)
        limit, settled = bound, False
        rows = z_ptr, peak_ptr, window_ptr, length_ptr
        params = temperature_ptr, seed_low_ptr, seed_high_ptr, max_gap_ptr, top_k_ptr, top_p_ptr
        lists = near_ptr, keys_ptr, chosen_ptr, rest_ptr, rests_ptr
        drawn, sizes = (value_ptr, id_ptr), (V, parts, id_bits)
        if listed <= SHORT:
            settled, limit = _settle_list(
                row, rows, params, lists, listed, drawn, sizes, SHORT, CAPACITY, PARTS, BLOCK
            )
        elif listed <= CAPACITY:
            settled, limit = _settle_list(
                row, rows, params, lists, listed, drawn, sizes, CAPACITY, CAPACITY, PARTS, BLOCK
            )
        if not settled:
            peak, temperature = tl.load(peak_ptr + row), tl.load(temperature_ptr + window)
            top_k, top_p = tl.load(top_k_ptr + window), tl.load(top_p_ptr + window)
            logits = z_ptr + row * V, V, peak, temperature, id_bits
            limit = whole_limit(logits, bound, top_k, top_p, BLOCK)
            append(whole_ptr, counts_ptr + 1, row)
        tl.store(limit_ptr + row, limit)


def draw_restricted(
    z: Tensor,
    peak: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    lists: CandidateLists,
    value: Tensor,
    ids: Tensor,
) -> None:
    """Draw for the restricted rows of z f32[N, V], or find the limit of what is drawn from them.

    For settled rows, value f32[N, parts] and ids i32[N, parts] hold the drawn token afterwards.
    """
    (rows, vocab), parts = z.shape, value.shape[1]
    id_bits = id_bits_of(vocab)
    gather(z, peak, window, params, lists)
    _settle_kernel[(rows,)](
        z,
        peak,
        window,
        length,
        params.temperature,
        params.seed_low,
        params.seed_high,
        params.max_gap,
        params.top_k,
        params.top_p,
        lists.counts,
        lists.restricted,
        lists.whole,
        lists.limit,
        lists.near,
        lists.listed,
        lists.keys,
        lists.chosen,
        lists.rest,
        lists.rests,
        value,
        ids,
        vocab,
        parts,
        id_bits,
        CAPACITY=lists.keys.shape[1],
        SHORT=min(SHORT, lists.keys.shape[1]),
        PARTS=triton.next_power_of_2(parts),
        BLOCK=ROW_BLOCK,
        num_warps=_ROW_WARPS,
        enable_fp_fusion=False,
    )
