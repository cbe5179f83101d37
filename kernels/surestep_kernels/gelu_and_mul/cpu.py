"""The gated activation of Gemma's MLP in C."""

from __future__ import annotations

from functools import partial

from surestep_kernels.columns.cpu.binding import CFunction, Library
from surestep_kernels.silu_and_mul.cpu import activate


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    return {"gelu_and_mul": partial(activate, library.short("gelu_and_mul", "2P 2l i"))}
