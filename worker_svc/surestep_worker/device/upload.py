"""From columns on the host to tensors on the device: one copy, however many columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Column = npt.NDArray[Any]  # of 32-bit elements
Tree = TypeVar("Tree", bound="tuple[Any, ...]")  # named tuples of columns and of named tuples

_ALIGN = 4  # words
_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Sent(NamedTuple, Generic[Tree]):
    """What `upload` has made."""

    tree: Tree
    words: Tensor  # i32, which the tensors of `tree` are views of, in order


def upload(tree: Tree, device: torch.device) -> Sent[Tree]:
    """The same named tuples, their arrays of 32-bit elements as tensors on the device.

    What is neither stays as it is. The copy is asynchronous: its source is pinned and belongs to
    torch's allocator, which does not hand it out again before the copy is over. Every tensor begins
    at a multiple of 16 bytes, whatever the sizes: kernels are compiled for how their pointers are
    aligned.
    """
    arrays = list(_arrays(tree))
    assert all(array.dtype in _TYPES for array in arrays)
    sizes = [_aligned(array.size) for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    into, first = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        into[first : first + array.size] = array.view(np.int32).reshape(-1)
        first += size
    words = host.to(device, non_blocking=True)
    tensors = (
        part[: array.size].view(_TYPES[array.dtype]).view(array.shape)
        for array, part in zip(arrays, words.split(sizes), strict=True)
    )
    return Sent(_replaced(tree, tensors), words)


def num_words(tree: tuple[Any, ...]) -> int:
    """Words that the arrays of a tree take."""
    return sum(_aligned(array.size) for array in _arrays(tree))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


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
