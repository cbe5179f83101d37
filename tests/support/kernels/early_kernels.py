"""Kernels that touch memory, or end, before they have waited for earlier kernels; and one that does
not. compile_launchers.py launches them as it does those of the product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from support.kernels.compile_launch import META, Launch
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels


@DependentKernel
@triton.jit
def _waiting_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    wait_for_earlier_kernels()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@DependentKernel
@triton.jit
def _loading_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    wait_for_earlier_kernels()
    tl.store(out_ptr + at, x)


@DependentKernel
@triton.jit
def _storing_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 0.0)
    wait_for_earlier_kernels()
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@DependentKernel
@triton.jit
def _leaving_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    if tl.program_id(0) > 0:
        return
    wait_for_earlier_kernels()
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@DependentKernel
@triton.jit
def _never_waiting_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


KERNELS = (
    _waiting_kernel,
    _loading_kernel,
    _storing_kernel,
    _leaving_kernel,
    _never_waiting_kernel,
)


def launches(*, full: bool) -> Iterator[Launch]:
    """Of each kernel one."""
    out, x = (torch.empty(1024, device=META) for _ in range(2))
    for kernel in KERNELS:
        yield Launch("early", "of 1024 elements", partial(kernel[(8,)], out, x, BLOCK=128))
