"""Memory for caches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros, on the CPU as untouched pages of the system, which are free until used.

    Filling gigabytes would be the largest part of a worker's recovery.
    """
    if device != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
