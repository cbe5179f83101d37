"""The invariants of the step protocol, as pure functions that scheduler and worker both call.

A plan says of each row what to compute, a result what came of it. Rows are checked by columns, a
few vector operations for all of them: parallel int64 arrays [R], declared here once.
Each side passes what it knows itself (its own committed length, its own log of accepted counts), so
that a fault on one side cannot hide behind a copy it sent to the other. A broken invariant raises
LedgerError, which is fatal to the epoch: it is never repaired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from .errors import InternalError

# The values of DecodeMode in worker.proto, so that pure code needs no generated module.
PREFILL: Final = 1
PREFILL_LAST: Final = 2
DECODE: Final = 3
VERIFY: Final = 4
POOL: Final = 6

# Those of Pooling.
LAST_TOKEN: Final = 1
MEAN: Final = 2
LABEL_LOGITS: Final = 3

NULL_BLOCK: Final = 0  # never allocated: padding of block tables points at it

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class LedgerError(InternalError):
    """Scheduler and worker disagree, or one of them broke the protocol."""


class DigestError(LedgerError):
    """The ranks did not compute the same."""


def check_step(expected: int, step: int) -> None:
    """Check invariant 1: steps are consecutive. Raises LedgerError."""
    if step != expected:
        raise LedgerError(f"step {step} where step {expected} was expected")


def check_digests(step: int, digests: Sequence[int]) -> None:
    """Raise DigestError unless all ranks computed the same tokens, counts and lengths."""
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
    """Check invariant 2: rows run from a committed length within the bounds of their plan."""
    inside = (len_lo <= length) & (length <= len_hi)
    require(inside, slot, "committed length {} outside [{}, {}]", length, len_lo, len_hi)


def chunked_length(prompt_len: IntArray, chunk: int) -> IntArray:
    """Return how many leading tokens of prompts recurrent layers compute in whole chunks."""
    return prompt_len // chunk * chunk


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
    """Return the tokens in the recurrent state after rows that ran from `len_before` and were OK.

    The tokens of a prefill row go into the state at once, those of a decoding row with the row
    that follows it.
    """
    return np.where(consumes_known(mode), len_before + advance, len_before)


def consumes_known(mode: IntArray) -> BoolArray:
    """Return which rows consume tokens of a prompt, or of what was emitted before."""
    mask: BoolArray = (mode == PREFILL) | (mode == PREFILL_LAST) | (mode == POOL)
    return mask


@dataclass(frozen=True)
class _Rows:
    """Columns [R] of one step."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(cls.__dataclass_fields__)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Return each column's name and array."""
        return ((name, getattr(self, name)) for name in self.names())

    def take(self, rows: IntArray) -> Self:
        """Return the rows [N] with these indices, which are sorted and unique."""
        if len(rows) == len(self):
            return self
        return type(self)(**{name: column[rows] for name, column in self.columns()})

    def __len__(self) -> int:
        return len(getattr(self, self.names()[0]))


@dataclass(frozen=True)
class PlanRows(_Rows):
    """Rows of a plan; StepPlan in worker.proto explains each column."""

    slot: IntArray
    slot_epoch: IntArray
    mode: IntArray  # values of DecodeMode
    num_tokens: IntArray
    len_lo: IntArray
    len_hi: IntArray
    max_drafts: IntArray
    max_proposed: IntArray
    max_looked_up: IntArray
    accepted_step: IntArray
    accepted: IntArray
    depends_on_step: IntArray
    catch_up: IntArray
    adapter: IntArray

    @classmethod
    def none(cls) -> Self:
        """Return no rows."""
        return cls(*np.zeros((len(cls.names()), 0), dtype=np.int64))

    @cached_property
    def is_prefill(self) -> BoolArray:
        """Rows that consume known tokens named by `num_tokens`."""
        return consumes_known(self.mode)

    @cached_property
    def is_sampled(self) -> BoolArray:
        """Rows that choose at least one token."""
        mask: BoolArray = (self.mode != PREFILL) & (self.mode != POOL)
        return mask


@dataclass(frozen=True)
class ResultRows(_Rows):
    """Rows of a result; StepResult in worker.proto explains each column."""

    ok: BoolArray
    non_finite: BoolArray  # not ok because of the model's logits, not of the request's parameters
    len_before: IntArray
    n_drafts: IntArray
    n_accepted: IntArray
    n_emitted: IntArray
    drafter_len: IntArray
    n_forced: IntArray
    n_looked_up: IntArray

    @property
    def n_drafts_emitted(self) -> IntArray:
        """Accepted drafts [R]; those behind a stop id were never emitted."""
        return np.minimum(self.n_accepted, self.n_emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSlots:
    """Slots of the rows [R] as the checking side knows them. Lengths are in tokens."""

    length: IntArray  # committed
    capacity: IntArray  # covered by the slot's blocks
    prefill_len: IntArray  # known at admission
    max_len: IntArray  # of the request
    prompt_len: IntArray  # of the request
    pools: BoolArray  # the request wants a vector
    logged_accepted: IntArray  # drafts recorded for `accepted_step`; 0 if that is 0, -1 = no entry
    last_step: IntArray  # planned or run for this tenancy; 0 = none
    prompt_chunk: int  # of the workers, at least 1
    own_adapter: IntArray  # of the request, as its place plus 1; 0 = none


def check_plan_rows(rows: PlanRows, known: KnownSlots) -> None:
    """Check invariants 2, 3 and 5 for the rows of a plan, and that modes follow from the state.

    Raises LedgerError for the first row that breaks one.
    """
    slot, mode, len_hi, max_drafts = rows.slot, rows.mode, rows.len_hi, rows.max_drafts
    check_lengths(slot=slot, len_lo=rows.len_lo, len_hi=len_hi, length=known.length)
    message = "plan says {} drafts were accepted, the log {}"
    logged = known.logged_accepted
    require(rows.accepted == logged, slot, message, rows.accepted, logged)
    message = "row continues step {}, but {} was the last one"
    last_step = known.last_step
    require(rows.depends_on_step == last_step, slot, message, rows.depends_on_step, last_step)

    message = "row of adapter {}, the request has {}"
    require(rows.adapter == known.own_adapter, slot, message, rows.adapter, known.own_adapter)

    verify, last = mode == VERIFY, np.where(known.pools, mode == POOL, mode == PREFILL_LAST)
    decoding, prefilling = (verify | (mode == DECODE)) & ~known.pools, last | (mode == PREFILL)
    require(decoding | prefilling, slot, "mode {} cannot be planned here", mode)
    end = len_hi + np.where(decoding, max_drafts + 1, rows.num_tokens)
    consistent = np.where(
        decoding,
        (rows.num_tokens == 0) & (verify == (max_drafts > 0)) & (len_hi >= known.prefill_len),
        (rows.num_tokens > 0) & (max_drafts == 0) & (last == (end == known.prefill_len)),
    )
    message = "mode {} with {} known tokens and max_drafts {}, {} of {} prefilled"
    columns = mode, rows.num_tokens, max_drafts, len_hi, known.prefill_len
    require(consistent, slot, message, *columns)
    proposed = rows.max_proposed
    message = "the drafter may propose {} of at most {} drafts"
    require(proposed <= max_drafts, slot, message, proposed, max_drafts)
    looked_up, message = rows.max_looked_up, "{} of at most {} drafts may be looked up"
    require(looked_up <= max_drafts, slot, message, looked_up, max_drafts)
    _check_cuts(rows, prefilling, end, known)
    limit = np.where(decoding, known.max_len - 1, known.prefill_len)
    require(end <= limit, slot, "mode {} could end at token {} of at most {}", mode, end, limit)
    message = "blocks cover {} tokens, the row may write {}"
    require(end <= known.capacity, slot, message, known.capacity, end)


def _check_cuts(rows: PlanRows, prefilling: BoolArray, end: IntArray, known: KnownSlots) -> None:
    """Check that no chunk is cut: what a prompt's row computes depends on no other cut."""
    chunk = known.prompt_chunk
    if chunk == 1:
        return
    chunked = chunked_length(known.prompt_len, chunk)
    whole = [(at % chunk == 0) | (at >= chunked) for at in (rows.len_hi, end)]
    message = f"tokens {{}} to {{}} of a prompt of {{}} cut a chunk of {chunk}"
    columns = rows.len_hi, end, known.prompt_len
    require(~prefilling | (whole[0] & whole[1]), rows.slot, message, *columns)


def check_result_rows(
    planned: PlanRows, result: ResultRows, *, committed: IntArray, ends_with_stop: BoolArray
) -> IntArray:
    """Check invariants 2 and 4 for rows; return by how many tokens [R] each slot advances.

    `committed` is the caller's own length before the row, in tokens, `ends_with_stop` whether the
    last emitted id is a stop id of the request. Raises LedgerError.
    """
    slot, mode, len_before = planned.slot, planned.mode, result.len_before
    accepted, emitted = result.n_accepted, result.n_emitted
    message = "row ran from length {}, committed are {}"
    require(len_before == committed, slot, message, len_before, committed)
    drafts = result.n_drafts
    ordered = (accepted >= 0) & (accepted <= drafts) & (drafts <= planned.max_drafts)
    message = "{} accepted of {} drafts of at most {}"
    require(ordered, slot, message, accepted, drafts, planned.max_drafts)

    forced, found = result.n_forced, result.n_looked_up
    proposed, message = drafts - forced - found, "{} of {} drafts are the drafter's, {} looked up"
    within = (forced >= 0) & (found >= 0) & (proposed >= 0) & (proposed <= planned.max_proposed)
    within &= found <= planned.max_looked_up
    require(within, slot, message, proposed, drafts, found)

    sampling = result.ok & planned.is_sampled
    cut = ends_with_stop & (emitted > 0) & (emitted <= accepted)
    whole = emitted == accepted + 1
    message = "{} tokens emitted for {} accepted drafts"
    require(~sampling | whole | cut, slot, message, emitted, accepted)
    message = "{} tokens emitted by a failed row or by mode {}"
    require(sampling | (emitted == 0), slot, message, emitted, mode)
    consumed = np.where(planned.is_prefill, planned.num_tokens, emitted)
    return np.where(result.ok, consumed, 0)


def drafter_watermark(
    planned: PlanRows, *, len_before: IntArray, drafter_len: IntArray
) -> IntArray:
    """Return the positions [R] that the drafter's state covers after the rows.

    `drafter_len` is what it covered before them, `len_before` the committed length when they run.
    Raises LedgerError when a drafter would propose from a state that lags.
    """
    after: IntArray = np.minimum(len_before, drafter_len + planned.catch_up)
    message = "drafts from a state of {} tokens at length {}"
    ready = (planned.max_proposed == 0) | (after == len_before)
    require(ready, planned.slot, message, after, len_before)
    return after


def as_bits(mask: BoolArray) -> bytes:
    """Return a mask as messages have it: the first element is the lowest bit of the first byte."""
    return np.packbits(mask, bitorder="little").tobytes()


def of_bits(bits: bytes, count: int) -> BoolArray:
    """Return the first `count` elements of a mask that a message has."""
    unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return unpacked[:count].astype(np.bool_)
