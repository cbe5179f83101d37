"""The invariants of the step protocol, as pure functions that scheduler and worker both call.

Each side passes what it knows itself (its own committed length, its own log of accepted counts), so
that a fault on one side cannot hide behind a copy it sent to the other. A broken invariant raises
LedgerError, which is fatal to the epoch: it is never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .errors import InternalError

# The values of DecodeMode in engine.proto, so that pure code needs no generated module.
PREFILL: Final = 1
PREFILL_LAST: Final = 2
DECODE: Final = 3
VERIFY: Final = 4
CATCH_UP: Final = 5

_DECODING = frozenset((DECODE, VERIFY))
_SAMPLING = frozenset((PREFILL_LAST, DECODE, VERIFY))


class LedgerError(InternalError):
    """Scheduler and worker disagree, or one of them broke the protocol."""


def check_step(expected: int, step: int) -> None:
    """Invariant 1: steps are consecutive."""
    if step != expected:
        raise LedgerError(f"step {step} where step {expected} was expected")


def check_digests(step: int, digests: Sequence[int]) -> None:
    """All ranks computed the same tokens, counts and lengths in this step."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise LedgerError(
                f"step {step}: rank {rank} has digest {digest:#x}, rank 0 has {digests[0]:#x}"
            )


def check_plan_row(
    *,
    mode: int,
    num_tokens: int,
    len_lo: int,
    len_hi: int,
    k_cap: int,
    accepted: int,
    depends_on_step: int,
    length: int,
    capacity: int,
    prefill_len: int,
    max_len: int,
    logged_accepted: int | None,
    last_step: int,
) -> None:
    """Invariants 2, 3 and 5 for one row of a plan, and that its mode follows from the state.

    The first seven arguments are the row's columns. The rest is the caller's own knowledge, in
    tokens unless said: `length` committed, `capacity` covered by the slot's blocks, `prefill_len`
    given at admission, `max_len` of the request, `logged_accepted` drafts it recorded for the
    row's `accepted_step` (0 when that is 0; None when it has no such entry), `last_step` it planned
    or ran for this tenancy (0 = none).
    """
    if not len_lo <= length <= len_hi:
        raise LedgerError(f"committed length {length} outside [{len_lo}, {len_hi}]")
    if accepted != logged_accepted:
        raise LedgerError(f"plan says {accepted} drafts were accepted, the log {logged_accepted}")
    if depends_on_step != last_step:
        raise LedgerError(f"row continues step {depends_on_step}, but {last_step} was the last one")
    if mode in _DECODING:
        if num_tokens or (mode == VERIFY) != (k_cap > 0) or len_hi < prefill_len:
            raise LedgerError(
                f"mode {mode} with {num_tokens} known tokens and k_cap {k_cap}, {len_hi} of "
                f"{prefill_len} prefilled"
            )
        end = len_hi + k_cap + 1
        if end >= max_len:
            raise LedgerError(f"row could reach {end + 1} known tokens of at most {max_len}")
    else:
        end = len_hi + num_tokens
        _check_prefill(mode, num_tokens, k_cap, end, prefill_len)
    if end > capacity:
        raise LedgerError(f"blocks cover {capacity} tokens, the row may write {end}")


def _check_prefill(mode: int, num_tokens: int, k_cap: int, end: int, prefill_len: int) -> None:
    if num_tokens < 1 or k_cap:
        raise LedgerError(f"prefill row of {num_tokens} tokens with k_cap {k_cap}")
    if mode == PREFILL_LAST:
        fits = end == prefill_len
    elif mode == PREFILL:
        fits = end < prefill_len
    else:
        raise LedgerError(f"mode {mode} cannot be planned here")
    if not fits:
        raise LedgerError(f"mode {mode} ends at token {end} of {prefill_len}")


def check_result_row(
    *,
    mode: int,
    num_tokens: int,
    k_cap: int,
    ok: bool,
    len_before: int,
    n_drafts: int,
    n_accepted: int,
    n_emitted: int,
    ends_with_stop: bool,
    committed: int,
) -> int:
    """Invariants 2 and 4 for one row of a result; returns by how many tokens the slot advances.

    `mode`, `num_tokens` and `k_cap` are the planned row's; `ok` is status == OK; `ends_with_stop`
    tells whether the last emitted id is a stop id of the request; `committed` is the caller's own
    length before the row, in tokens.
    """
    if len_before != committed:
        raise LedgerError(f"row ran from length {len_before}, committed are {committed}")
    if not 0 <= n_accepted <= n_drafts <= k_cap:
        raise LedgerError(f"{n_accepted} accepted of {n_drafts} drafts of at most {k_cap}")
    if not ok:
        if n_emitted:
            raise LedgerError(f"{n_emitted} tokens emitted by a failed row")
        return 0
    if mode in _SAMPLING:
        if n_emitted != n_accepted + 1 and not (0 < n_emitted <= n_accepted and ends_with_stop):
            raise LedgerError(f"{n_emitted} tokens emitted for {n_accepted} accepted drafts")
        return num_tokens if mode == PREFILL_LAST else n_emitted
    if n_emitted:
        raise LedgerError(f"{n_emitted} tokens emitted by mode {mode}")
    return num_tokens if mode == PREFILL else 0
