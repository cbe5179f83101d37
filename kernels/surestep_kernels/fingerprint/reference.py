"""Hash all bits of a step's hidden states into a number, which the ranks of a group compare."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from surestep_kernels.slot_state import StepRows

_BITS = {2: torch.int16, 4: torch.int32}


class Fingerprint(Protocol):
    def __call__(self, hidden: Tensor, rows: StepRows, valid: Tensor) -> Tensor: ...


def fingerprint_reference(hidden: Tensor, rows: StepRows, valid: Tensor) -> Tensor:
    """Sum the bit patterns of hidden [N + P, H] without padding: i64[1], wrapping.

    The first N rows are those of `rows`: they count if their index within the row is below valid
    i32[R].
    """
    sums, num_positions = row_fingerprints(hidden), len(rows.position_row)
    real = rows.position_offset < valid[rows.position_row.long()]
    windows = torch.where(real, sums[:num_positions], 0).sum()
    return (windows + sums[num_positions:].sum()).reshape(1)


def row_fingerprints(hidden: Tensor) -> Tensor:
    """Return the sum i64[N] of each row of a bf16, fp16 or fp32 tensor [N, H]."""
    return hidden.contiguous().view(_BITS[hidden.element_size()]).sum(dim=1, dtype=torch.int64)
