"""Changing logits in C."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, check_memory, struct

from .reference import Positions, Shaping

_SHAPES = "bias", "penalise", "forbid", "mask"  # in the order of Shaping


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    shapes = [library.long(name, "P l 2P l", "i") for name in _SHAPES]
    return {"shape_logits": partial(shape_logits, shapes)}


def shape_logits(
    shapes: Sequence[CFunction], z: Tensor, positions: Positions, shaping: Shaping
) -> None:
    assert z.dtype is torch.float32
    assert z.is_contiguous()
    vocab, width = z.shape[1], positions.tokens.shape[1]
    at = struct(positions, width)
    for shape, asked in zip(shapes, shaping, strict=True):
        if asked is not None:
            check_memory(shape(z.data_ptr(), vocab, at, struct(asked), len(asked.which)))
