"""Write differences of a plan into the slots, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import Runs

_BLOCK = 1024


@DependentKernel
@triton.jit
def _write_runs_kernel(
    memory_ptr,  # i32[M]
    to_ptr,  # i32[G]
    cu_ptr,  # i32[G+1]
    words_ptr,  # i32[..]
    M,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    run = tl.program_id(0)
    begin, end = tl.load(cu_ptr + run), tl.load(cu_ptr + run + 1)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(to_ptr + run).to(tl.int64) + offset
    mask = (begin + offset < end) & (to >= 0) & (to < M)
    words = tl.load(words_ptr + begin.to(tl.int64) + offset, mask=mask, other=0)
    tl.store(memory_ptr + to, words, mask=mask)


def write_runs(memory: Tensor, runs: Runs) -> None:
    """Write the runs; words outside of the memory are dropped."""
    assert memory.is_contiguous()
    grid = len(runs.to), triton.cdiv(runs.longest, _BLOCK)
    _write_runs_kernel[grid](memory, runs.to, runs.cu, runs.words, memory.numel(), BLOCK=_BLOCK)
