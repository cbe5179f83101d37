"""The invariants of the step protocol, as pure functions that scheduler and worker both call.

Rows are checked by columns, a few vector operations for all of them: parallel int64 arrays [R].
Each side passes what it knows itself (its own committed length, its own log of accepted counts), so
that a fault on one side cannot hide behind a copy it sent to the other. A broken invariant raises
LedgerError, which is fatal to the epoch: it is never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import InternalError

# The values of DecodeMode in engine.proto, so that pure code needs no generated module.
PREFILL: Final = 1
PREFILL_LAST: Final = 2
DECODE: Final = 3
VERIFY: Final = 4
POOL: Final = 6

# Those of Pooling.
LAST_TOKEN: Final = 1
MEAN: Final = 2

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class LedgerError(InternalError):
    """Scheduler and worker disagree, or one of them broke the protocol."""


class DigestError(LedgerError):
    """The ranks did not compute the same."""


def check_step(expected: int, step: int) -> None:
    """Invariant 1: steps are consecutive."""
    if step != expected:
        raise LedgerError(f"step {step} where step {expected} was expected")


def check_digests(step: int, digests: Sequence[int]) -> None:
    """All ranks computed the same tokens, counts and lengths in this step."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DigestError(
                f"step {step}: rank {rank} has digest {digest:#x}, rank 0 has {digests[0]:#x}"
            )


def require(holds: BoolArray, slot: IntArray, message: str, *columns: IntArray) -> None:
    """Raise LedgerError for the first failing row [R]: `message` with its values of `columns`."""
    if not len(slot):
        return
    row = int(holds.argmin())
    if not holds[row]:
        values = (int(column[row]) for column in columns)
        raise LedgerError(f"slot {slot[row]}: {message.format(*values)}")


def check_lengths(*, slot: IntArray, len_lo: IntArray, len_hi: IntArray, length: IntArray) -> None:
    """Invariant 2: rows run from a committed length within the bounds of their plan."""
    inside = (len_lo <= length) & (length <= len_hi)
    require(inside, slot, "committed length {} outside [{}, {}]", length, len_lo, len_hi)


def check_plan_rows(
    *,
    slot: IntArray,
    mode: IntArray,
    num_tokens: IntArray,
    len_lo: IntArray,
    len_hi: IntArray,
    k_cap: IntArray,
    accepted: IntArray,
    depends_on_step: IntArray,
    length: IntArray,
    capacity: IntArray,
    prefill_len: IntArray,
    max_len: IntArray,
    prompt_len: IntArray,
    chunk: int,
    pools: BoolArray,
    logged_accepted: IntArray,
    last_step: IntArray,
) -> None:
    """Invariants 2, 3 and 5 for the rows of a plan, and that their modes follow from the state.

    The first eight arguments are the plan's columns. The rest is the caller's own knowledge of each
    row's slot, in tokens unless said: `length` committed, `capacity` covered by the slot's blocks,
    `prefill_len` given at admission, `max_len` and `prompt_len` of the request, `pools` whether it
    wants a vector, `logged_accepted` drafts it recorded for the row's `accepted_step` (0 when that
    is 0; -1 when it has no such entry), `last_step` it planned or ran for this tenancy (0 = none);
    and `chunk`, the workers' prompt_chunk, at least 1.
    """
    check_lengths(slot=slot, len_lo=len_lo, len_hi=len_hi, length=length)
    message = "plan says {} drafts were accepted, the log {}"
    require(accepted == logged_accepted, slot, message, accepted, logged_accepted)
    message = "row continues step {}, but {} was the last one"
    require(depends_on_step == last_step, slot, message, depends_on_step, last_step)

    verify, last = mode == VERIFY, np.where(pools, mode == POOL, mode == PREFILL_LAST)
    decoding, prefilling = (verify | (mode == DECODE)) & ~pools, last | (mode == PREFILL)
    require(decoding | prefilling, slot, "mode {} cannot be planned here", mode)
    end = len_hi + np.where(decoding, k_cap + 1, num_tokens)
    consistent = np.where(
        decoding,
        (num_tokens == 0) & (verify == (k_cap > 0)) & (len_hi >= prefill_len),
        (num_tokens > 0) & (k_cap == 0) & (last == (end == prefill_len)),
    )
    message = "mode {} with {} known tokens and k_cap {}, {} of {} prefilled"
    require(consistent, slot, message, mode, num_tokens, k_cap, len_hi, prefill_len)
    _check_cuts(slot, prefilling, len_hi, end, prompt_len, chunk)
    limit = np.where(decoding, max_len - 1, prefill_len)
    require(end <= limit, slot, "mode {} could end at token {} of at most {}", mode, end, limit)
    require(end <= capacity, slot, "blocks cover {} tokens, the row may write {}", capacity, end)


def chunked_length(prompt_len: IntArray, chunk: int) -> IntArray:
    """Leading tokens of prompts that recurrent layers compute in chunks, which are all whole."""
    return prompt_len // chunk * chunk


def _check_cuts(
    slot: IntArray,
    prefilling: BoolArray,
    begin: IntArray,
    end: IntArray,
    prompt_len: IntArray,
    chunk: int,
) -> None:
    """No chunk is cut: what a prompt's row computes does not depend on where others are cut."""
    if chunk == 1:
        return
    chunked = chunked_length(prompt_len, chunk)
    whole = [(at % chunk == 0) | (at >= chunked) for at in (begin, end)]
    message = f"tokens {{}} to {{}} of a prompt of {{}} cut a chunk of {chunk}"
    require(~prefilling | (whole[0] & whole[1]), slot, message, begin, end, prompt_len)


def check_result_rows(
    *,
    slot: IntArray,
    mode: IntArray,
    num_tokens: IntArray,
    k_cap: IntArray,
    ok: BoolArray,
    len_before: IntArray,
    n_drafts: IntArray,
    n_accepted: IntArray,
    n_emitted: IntArray,
    ends_with_stop: BoolArray,
    committed: IntArray,
) -> IntArray:
    """Invariants 2 and 4 for the rows of a result; returns by how many tokens each slot advances.

    `mode`, `num_tokens` and `k_cap` are the planned rows'; `ok` is status == OK; `ends_with_stop`
    tells whether the last emitted id is a stop id of the request; `committed` is the caller's own
    length before the row, in tokens.
    """
    message = "row ran from length {}, committed are {}"
    require(len_before == committed, slot, message, len_before, committed)
    ordered = (n_accepted >= 0) & (n_accepted <= n_drafts) & (n_drafts <= k_cap)
    message = "{} accepted of {} drafts of at most {}"
    require(ordered, slot, message, n_accepted, n_drafts, k_cap)

    sampling = ok & ((mode == PREFILL_LAST) | (mode == DECODE) | (mode == VERIFY))
    cut = ends_with_stop & (n_emitted > 0) & (n_emitted <= n_accepted)
    whole = n_emitted == n_accepted + 1
    message = "{} tokens emitted for {} accepted drafts"
    require(~sampling | whole | cut, slot, message, n_emitted, n_accepted)
    message = "{} tokens emitted by a failed row or by mode {}"
    require(sampling | (n_emitted == 0), slot, message, n_emitted, mode)
    consumed = np.where(consumes_known(mode), num_tokens, n_emitted)
    return np.where(ok, consumed, 0)


def drafter_watermark(
    *,
    slot: IntArray,
    mode: IntArray,
    catch_up: IntArray,
    len_before: IntArray,
    draft_upto: IntArray,
) -> IntArray:
    """Positions that the drafter's state covers after the rows, given `draft_upto` before them.

    `mode` and `catch_up` are the planned rows', `len_before` the committed length when they run.
    Raises LedgerError when a VERIFY row would draft from a state that lags.
    """
    after: IntArray = np.minimum(len_before, draft_upto + catch_up)
    message = "drafts from a state of {} tokens at length {}"
    ready = (mode != VERIFY) | (after == len_before)
    require(ready, slot, message, after, len_before)
    return after


def check_drafter_faults(*, known: int, before: int, after: int, skipped: bool) -> None:
    """Raise LedgerError unless a result's count of drafter faults continues the books.

    `known` is the count its plan carried, `before` that of the result before. The drafter is left
    alone exactly in the steps in which it fails and in those whose plan knows of fewer faults.
    """
    if not known <= before <= after <= before + (known == before):
        raise LedgerError(f"drafter faults: {before}, then {after}, the plan knew of {known}")
    if skipped != (after > known):
        raise LedgerError(f"drafter skipped: {skipped} with {after} faults, {known} known")


def folded_length(mode: IntArray, len_before: IntArray, advance: IntArray) -> IntArray:
    """Tokens in the recurrent state after rows that ran from `len_before` and were OK.

    The tokens of a prefill row go into the state at once, those of a decoding row with the row
    that follows it.
    """
    return np.where(consumes_known(mode), len_before + advance, len_before)


def consumes_known(mode: IntArray) -> BoolArray:
    """Rows that consume tokens of a prompt, or of what was emitted before."""
    mask: BoolArray = (mode == PREFILL) | (mode == PREFILL_LAST) | (mode == POOL)
    return mask
