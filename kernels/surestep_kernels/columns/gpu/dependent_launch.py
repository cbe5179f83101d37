"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A launch with `launch_pdl` (programmatic stream serialization; in a captured graph a programmatic
edge) may start once every program of the kernel before it has allowed it or has ended. Until that
kernel is complete, what it writes must not be read, and what it reads must not be written. One rule
is enough for that: every kernel begins with `wait_for_earlier_kernels`, before which it touches no
global memory. tests/kernels/test_gpu_compiles.py checks in the machine code that the wait comes
first.

Why it is enough: of three kernels A, B, C on a stream, C starts once every program of B has allowed
it or has ended. B's programs do both only after their own wait, which returns when A is complete
and its writes are visible. So A is complete before C starts: only two neighbours ever overlap, and
the later one touches nothing until its wait has returned, when the earlier one is complete and
visible too. By induction the result is as if none overlapped.

Kernels of other libraries, such as torch and cuBLAS, and copies run in between. They are launched
without the option, and start when everything before them is complete. They allow nothing while they
run, so one of our kernels after them waits for their end. Kernels of a library that sets the option
itself have to wait for whatever precedes them, as NVIDIA requires of all that set it.

The next kernel is allowed to start right after the wait. That costs no occupancy: every program of
this kernel is resident by then, and those of the next take what is left over. If it were allowed
before the wait, a third kernel could be resident and waiting there too.

Weights are never written while a worker serves: a product could fetch its first tile of them before
the wait. None does so far: the loop that loads tiles would have to be restructured, once in each
family of products.

Sources: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
"griddepcontrol". Both instructions do nothing in a kernel that was launched without the option, so
one binary serves both ways of launching.
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
    """Return when all earlier kernels are complete and their writes are visible.

    It is the first statement of every kernel. On GPUs without dependent launch it does nothing.
    """
    if _IS_COMPILED:  # noqa: SIM102  # the interpreter has no target
        if cuda_capability_geq(_LEAST_CAPABILITY):
            gdc_wait()
            gdc_launch_dependents()


class DependentKernel:
    """A Triton kernel that begins with `wait_for_earlier_kernels`. Launch it as kernel[grid]."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel[grid], **_launch_options)


def use_dependent_launches(*, enabled: bool) -> None:
    """Enable or disable programmatic dependent launch for the kernels of this process.

    Call it before the first launch, since Triton recompiles a kernel for other options. Raises
    InvalidRequest if the GPU does not support it.
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
