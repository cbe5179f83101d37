"""The invariants of the step protocol, as pure functions that scheduler and worker both call.

Those between the columns of rows are in plan_rows.py. Rows are checked by columns, a few vector
operations for all of them: parallel int64 arrays [R].
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
