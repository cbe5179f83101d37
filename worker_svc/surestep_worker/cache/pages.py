"""Memory for caches."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros, on the CPU as untouched pages of the system, which are free until used.

    Filling gigabytes would be the largest part of a worker's recovery. An allocator of C would do
    that: what it takes for one of some threads it clears, up to 32 MB.
    """
    if device != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
