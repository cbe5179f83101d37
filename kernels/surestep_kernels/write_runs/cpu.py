"""Writing runs of words in C."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, pointers

from .reference import Runs


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("write_runs", "4P l")
    return {"write_runs": partial(write_runs, run)}


def write_runs(run: CFunction, memory: Tensor, runs: Runs) -> None:
    run(*pointers(memory, runs.to, runs.cu, runs.words), len(runs.to))
