"""From columns on the host to tensors on the device: one copy, however many columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from surestep_common.invariants import Int32Array
from torch import Tensor

Column = npt.NDArray[Any]  # of 32-bit elements
Tree = TypeVar("Tree", bound="tuple[Any, ...]")  # named tuples of columns and of named tuples
Extra = TypeVar("Extra", bound="tuple[Any, ...]")

_ALIGN = 4  # words
_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
_UNDER_WAY = 4  # steps with an upload or a download of one size, at pipelining depths of use
_ROOM = 1 << 14  # words of an inbox behind the largest layout: for what comes with most steps


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same named tuples, their arrays of 32-bit elements as tensors on the device.

    What is neither stays as it is. The copy is asynchronous: its source is pinned and belongs to
    torch's allocator, which does not hand it out again before an event behind the copy. Every
    tensor begins at a multiple of 16 bytes, whatever the sizes: kernels are compiled for how their
    pointers are aligned. Tensors on the CPU share the arrays' memory.
    """
    if device.type == "cpu":
        return _replaced(tree, map(torch.from_numpy, _arrays(tree)))
    arrays = list(_arrays(tree))
    host = _host_words(_size(arrays), device)
    _pack(arrays, host.numpy())
    return _views(tree, arrays, host.to(device, non_blocking=True))


class Layout(Generic[Tree]):
    """Columns of fixed sizes at fixed addresses on the device, each filled up with padding."""

    def __init__(self, padding: Tree, words: Tensor) -> None:
        """`padding` holds what stands where a step has nothing; `words` i32 are written by `fill`.

        A column called "cu" or "cu_.." has its own last element there: groups without members.
        """
        arrays = list(_arrays(padding))
        self.num_words = _size(arrays)
        self._words = words[: self.num_words]
        self.tree = _views(padding, arrays, self._words)
        self._padding: Int32Array = np.zeros(self.num_words, dtype=np.int32)
        _pack(arrays, self._padding)
        self._size = [array.size for array in arrays]
        self._first = [0, *itertools.accumulate(map(_aligned, self._size))][:-1]
        self._grows = [name.partition("_")[0] == "cu" for name in _names(padding)]

    def clear(self) -> None:
        """Padding everywhere. Waits for the device."""
        self._words.copy_(torch.from_numpy(self._padding))

    def fill(self, tree: Tree, into: Int32Array) -> None:
        """All words of the layout, those of a step `tree` of arrays in front of the padding."""
        into[:] = self._padding
        for array, first, size, grows in zip(
            _arrays(tree), self._first, self._size, self._grows, strict=True
        ):
            end = first + array.size
            assert array.size <= size
            into[first:end] = array.view(np.int32)
            if grows:
                into[end : first + size] = array[-1]


class Inbox:
    """Words on the device that captured steps read, one step after the other.

    Nothing has to wait before they are overwritten: the copy is queued on the stream on which
    everything runs that reads them, behind the step before.
    """

    def __init__(self, paddings: Iterable[tuple[Any, ...]], device: torch.device) -> None:
        """With room for each of these."""
        self._device = device
        most = max(_size(list(_arrays(tree))) for tree in paddings)
        self.words = torch.zeros(most + _ROOM, dtype=torch.int32, device=device)

    def send(self, layout: Layout[Tree], tree: Tree, extra: Extra) -> Extra:
        """Fill the layout; `extra` travels behind it if there is room. Arrays become tensors."""
        arrays = list(_arrays(extra))
        fixed, total = layout.num_words, layout.num_words + _size(arrays)
        if total > len(self.words):
            self.send(layout, tree, ())
            return upload(extra, self._device)
        host = _host_words(total, self._device)
        into = host.numpy()
        layout.fill(tree, into[:fixed])
        _pack(arrays, into[fixed:])
        self.words[:total].copy_(host, non_blocking=True)
        return _views(extra, arrays, self.words[fixed:total]) if arrays else extra


def keep_pinned(most_words: int, device: torch.device) -> None:
    """Let torch's allocator have pinned memory of all sizes for the steps that may be under way.

    It rounds to powers of two. A step that found none would allocate, for which the host may wait.
    """
    if device.type == "cuda":
        sizes = [1 << power for power in range(most_words.bit_length() + 1)]
        kept = [_host_words(size, device) for size in sizes for _ in range(_UNDER_WAY)]
        assert all(words.is_pinned() for words in kept)


def _host_words(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


def _size(arrays: Iterable[Column]) -> int:
    return sum(_aligned(array.size) for array in arrays)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pack(arrays: Iterable[Column], into: Int32Array) -> None:
    """Behind each other."""
    first = 0
    for array in arrays:
        into[first : first + array.size] = array.view(np.int32).reshape(-1)
        first += _aligned(array.size)


def _views(tree: Tree, arrays: list[Column], words: Tensor) -> Tree:
    """The arrays of a tree, which lie in words on the device behind each other, as tensors."""
    sizes = [_aligned(array.size) for array in arrays]
    tensors = (
        part[: array.size].view(_TYPES[array.dtype]).view(array.shape)
        for array, part in zip(arrays, words.split(sizes), strict=True)
    )
    return _replaced(tree, tensors)


def _arrays(tree: tuple[Any, ...]) -> Iterator[Column]:
    for part in tree:
        if isinstance(part, np.ndarray):
            yield part
        elif isinstance(part, tuple):
            yield from _arrays(part)


def _names(tree: Any) -> Iterator[str]:
    """Of the arrays, in order."""
    for name, part in zip(tree._fields, tree, strict=True):
        if isinstance(part, np.ndarray):
            yield name
        elif isinstance(part, tuple):
            yield from _names(part)


def _replaced(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    def made(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return next(tensors)
        return _replaced(part, tensors) if isinstance(part, tuple) else part

    return type(tree)(*map(made, tree))
