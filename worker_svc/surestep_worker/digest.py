"""What the ranks of a group compare after every step."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32}


def fingerprint(hidden: Tensor) -> int:
    """Sum of the bit patterns of a bf16, fp16 or fp32 tensor, as a wrapping signed 64-bit integer.

    Sees any single changed bit; does not see elements that changed places. Waits for the device.
    """
    return int(row_fingerprints(hidden).sum()) if len(hidden) else 0


def row_fingerprints(hidden: Tensor) -> Tensor:
    """The same sums i64[N] of each row of [N, H], left on the device."""
    return hidden.contiguous().view(_BITS[hidden.element_size()]).sum(dim=1, dtype=torch.int64)
