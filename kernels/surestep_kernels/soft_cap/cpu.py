"""The soft cap of Gemma's logits in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    return {"soft_cap": partial(soft_cap, library.long("soft_cap", "P l f"))}


def soft_cap(run: CFunction, x: Tensor, cap: float) -> None:
    """Cap x in place, one element like another wherever it lies."""
    assert x.is_contiguous()
    assert x.dtype is torch.float32
    assert cap > 0
    run(x.data_ptr(), x.numel(), cap)
