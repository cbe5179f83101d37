"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A launch with `launch_pdl` (programmatic stream serialization; in a captured graph a programmatic
edge) may start once every program of the kernel before it has allowed it or has ended. What that
kernel writes must not be read, nor what it reads be written, before it is complete. One rule is
enough for that: every kernel begins with `wait_for_earlier_kernels`, before which it touches no
global memory. tests/kernels/test_gpu_compiles.py finds the wait in front of everything else in the
machine code.

Why it is enough. Of three kernels A, B, C on a stream, C starts once every program of B has
allowed it or has ended. B's programs do both behind their own wait only, which returns when A is
complete and its writes are visible. So A is complete before C starts, two neighbours are all that
ever overlap, and of these the later one touches nothing until its wait has returned, when the
earlier one is complete and visible too. By induction it is as if none overlapped.

Others' kernels, such as those of torch and cuBLAS, and copies stand in between. They are launched
without the option, and start when everything before them is complete. They allow nothing while
they run, so that one of ours behind them waits for their end. Kernels of a library that sets the
option by itself have to wait for whatever precedes them, as NVIDIA demands of all that set it.

The next kernel is allowed to start right behind the wait. That costs no occupancy: every program
of this kernel has a place by then, and those of the next take what is left, which could serve
nobody else. Allowed before the wait, a third kernel could lie waiting there too.

Weights are never written while a worker serves: a product could fetch its first tile of them before
the wait. None does so far: the loop that loads tiles would have to be taken apart, and would have
to be again in each family of products.

Sources: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
"griddepcontrol". Both instructions do nothing in a kernel that was launched without the option, so
that there is one code for both ways of launching.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from surestep_common.errors import InvalidRequest
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

LEAST_CAPABILITY = 9  # of GPUs that have it, from Hopper on
_LEAST_CAPABILITY = tl.constexpr(LEAST_CAPABILITY)
_IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)

_launch_options = dict[str, bool]()


@triton.jit
def wait_for_earlier_kernels():
    """Return when all earlier kernels are complete and what they wrote is visible.

    First statement of every kernel. Where GPUs have no dependent launch it is nothing.
    """
    if _IS_COMPILED:  # noqa: SIM102  # the interpreter has no target
        if cuda_capability_geq(_LEAST_CAPABILITY):
            gdc_wait()
            gdc_launch_dependents()


class DependentKernel:
    """A Triton kernel that begins with `wait_for_earlier_kernels`; launched as any: kernel[grid]"""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel[grid], **_launch_options)


def use_dependent_launches(*, enabled: bool) -> None:
    """Launch the kernels of this process with programmatic dependent launch from now on, or not.

    Decided before the first launch, since Triton compiles a kernel again for other options. Raises
    InvalidRequest where there is a GPU without it.
    """
    if enabled and torch.cuda.is_available() and not _gpu_has_it():
        name = "programmatic_dependent_launch"
        raise InvalidRequest("this GPU has no programmatic dependent launch", param=name)
    _launch_options.clear()
    if enabled:
        _launch_options["launch_pdl"] = True


def _gpu_has_it() -> bool:
    major, _ = torch.cuda.get_device_capability()
    return torch.version.cuda is not None and major >= LEAST_CAPABILITY
