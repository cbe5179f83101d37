"""Shared memory that caches lie in, so that they outlive the process."""

from __future__ import annotations

import math
import mmap
import os

import torch
from torch import Tensor


class CacheMemory:
    """Tensors one behind the other in a memfd, at multiples of the system's pages.

    A process that asks for the same tensors in the same order finds what an earlier one left in
    them. Untouched pages hold zeros and take no memory.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._fd = fd
        self._end = 0

    def __del__(self) -> None:
        os.close(self._fd)

    def rewind(self) -> None:
        """Begin again with the first tensor."""
        self._end = 0

    def clear(self) -> None:
        """Give all pages back, so that they hold zeros. None may be mapped."""
        os.ftruncate(self._fd, 0)
        self.rewind()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, mapped. It stays mapped as long as it is referred to."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.zeros(shape, dtype=dtype)
        begin = self._end
        self._end += nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._fd, max(self._end, os.fstat(self._fd).st_size))
        mapped = mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED, offset=begin)
        mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump of a rank need not hold texts
        return torch.frombuffer(mapped, dtype=dtype).view(shape)
