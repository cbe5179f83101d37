"""The sum of the bits of a step's hidden states, in one launch; whole numbers add in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.slot_state import StepRows

_BLOCK = 1024
_BITS = {2: torch.int16, 4: torch.int32}


@DependentKernel
@triton.jit(do_not_specialize=["N"])
def _fingerprint_kernel(
    sum_ptr,  # i64[1]
    bits_ptr,  # [N + P, H] of words as wide as the elements
    position_row_ptr,  # i32[N]
    position_offset_ptr,  # i32[N]
    valid_ptr,  # i32[R]
    N,
    H,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    line = tl.program_id(0).to(tl.int64)
    in_window = line < N
    row = tl.load(position_row_ptr + line, mask=in_window, other=0)
    offset = tl.load(position_offset_ptr + line, mask=in_window, other=-1)
    if offset >= tl.load(valid_ptr + row, mask=in_window, other=0):
        return
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        bits = tl.load(bits_ptr + line * H + column, mask=column < H, other=0)
        total += bits.to(tl.int64)
    tl.atomic_add(sum_ptr, tl.sum(total, axis=0), sem="relaxed")


def fingerprint(hidden: Tensor, rows: StepRows, valid: Tensor) -> Tensor:
    assert hidden.is_contiguous()
    total = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    if hidden.numel():
        _fingerprint_kernel[(len(hidden),)](
            total,
            hidden.view(_BITS[hidden.element_size()]),
            rows.position_row,
            rows.position_offset,
            valid,
            len(rows.position_row),
            hidden.shape[1],
            BLOCK=_BLOCK,
        )
    return total
