"""From columns on the host to tensors on the device: one copy, however many columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Column = npt.NDArray[Any]  # of 32-bit elements
Tree = TypeVar("Tree", bound="tuple[Any, ...]")  # named tuples of columns and of named tuples

_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same named tuples, their arrays of 32-bit elements as tensors on the device.

    What is neither stays as it is. The copy is asynchronous: its source is pinned and belongs to
    torch's allocator, which does not hand it out again before the copy is over.
    """
    arrays = list(_arrays(tree))
    assert all(array.dtype in _TYPES for array in arrays)
    host = torch.empty(
        sum(array.size for array in arrays), dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    np.concatenate([array.view(np.int32).reshape(-1) for array in arrays], out=host.numpy())
    words = host.to(device, non_blocking=True).split([array.size for array in arrays])
    tensors = (
        part.view(_TYPES[array.dtype]).view(array.shape)
        for array, part in zip(arrays, words, strict=True)
    )
    return _replaced(tree, tensors)


def _arrays(tree: tuple[Any, ...]) -> Iterator[Column]:
    for part in tree:
        if isinstance(part, np.ndarray):
            yield part
        elif isinstance(part, tuple):
            yield from _arrays(part)


def _replaced(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    def made(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return next(tensors)
        return _replaced(part, tensors) if isinstance(part, tuple) else part

    return type(tree)(*map(made, tree))
