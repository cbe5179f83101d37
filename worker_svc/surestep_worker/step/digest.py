"""What the ranks of a group compare after every step."""

from __future__ import annotations

from surestep_kernels.step.fingerprint import row_fingerprints
from torch import Tensor


def fingerprint(hidden: Tensor) -> int:
    """Sum of the bit patterns of a bf16, fp16 or fp32 tensor, as a wrapping signed 64-bit integer.

    Sees any single changed bit; does not see elements that changed places. Waits for the device.
    """
    return int(row_fingerprints(hidden).sum()) if len(hidden) else 0
