"""Choosing tokens in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    CFunction,
    Library,
    check_memory,
    empty_columns,
    pointers,
    struct,
)

from .reference import Chosen, DrawParams


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("choose", "6P 2l 2i", "i")
    return {"choose": partial(choose, run)}


def choose(
    run: CFunction,
    z: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    *,
    random: bool,
    truncated: bool,
) -> Chosen:
    assert z.dtype is torch.float32
    assert z.is_contiguous()
    rows, vocab = z.shape
    chosen = Chosen(*empty_columns(torch.int32, [rows, rows]))
    data = pointers(*chosen, z, window, length)
    check_memory(run(*data, struct(params), rows, vocab, random, truncated))
    return chosen
