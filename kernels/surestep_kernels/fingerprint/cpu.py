"""Fingerprints in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, pointers
from surestep_kernels.slot_state import StepRows


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("fingerprint", "4P 3l i", "q")
    return {"fingerprint": partial(fingerprint, run)}


def fingerprint(run: CFunction, hidden: Tensor, rows: StepRows, valid: Tensor) -> Tensor:
    hidden = hidden.contiguous()
    data = pointers(hidden, rows.position_row, rows.position_offset, valid)
    sizes = len(hidden), len(rows.position_row), hidden.shape[1], hidden.element_size()
    return torch.tensor([run(*data, *sizes)])
