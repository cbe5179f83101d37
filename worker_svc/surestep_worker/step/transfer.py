"""Between host and device: one copy for any number of columns, in either direction."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from surestep_common.invariants import Int32Array
from surestep_kernels.step_columns import HostColumn
from torch import Tensor

from surestep_worker.drafters.inputs import DraftInputs

from .batch import Extras, Inputs, StepColumns

Tree = tuple[Any, ...]  # a named tuple of columns and of such tuples, or a pair of these

_ALIGN = 4  # words
_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
_IN_FLIGHT = 4  # steps with an upload or a download of one size, at the usual pipelining depths
_ROOM = 1 << 14  # words of an input buffer behind the largest layout, for most steps' extras


@overload
def upload(tree: Inputs[HostColumn], device: torch.device) -> Inputs[Tensor]: ...
@overload
def upload(tree: StepColumns[HostColumn], device: torch.device) -> StepColumns: ...
@overload
def upload(tree: Extras[HostColumn], device: torch.device) -> Extras: ...
@overload
def upload(tree: DraftInputs[HostColumn], device: torch.device) -> DraftInputs: ...
@overload
def upload(tree: Tree, device: torch.device) -> Any: ...
def upload(tree: Tree, device: torch.device) -> Any:
    """Return the same tuples, with tensors on the device instead of arrays.

    Arrays have 32-bit elements; fields that hold neither arrays nor tuples are kept. The copy
    is asynchronous: its source is pinned and belongs to torch's allocator, which does not hand it
    out again before an event recorded after the copy. Every tensor begins at a multiple of 16
    bytes, whatever the sizes, because kernels are compiled for how their pointers are aligned.
    Tensors on the CPU share the arrays' memory.
    """
    if device.type == "cpu":
        return _replaced(tree, map(torch.from_numpy, _arrays(tree)))
    arrays = list(_arrays(tree))
    host = _host_words(_size(arrays), device)
    _pack(arrays, host.numpy())
    return _views(tree, arrays, host.to(device, non_blocking=True))


class Layout:
    """Columns of fixed sizes at fixed addresses on the device, each followed by padding."""

    def __init__(self, padding: StepColumns[HostColumn], words: Tensor) -> None:
        """Lay the columns of `padding` out in `words` i32, to which the result of `fill` is copied.

        A column named "cu" or "cu_.." is padded with its own last element: groups without members.
        """
        arrays = list(_arrays(padding))
        self.num_words = _size(arrays)
        self._words = words[: self.num_words]
        self.columns: StepColumns = _views(padding, arrays, self._words)
        self._padding: Int32Array = np.zeros(self.num_words, dtype=np.int32)
        _pack(arrays, self._padding)
        self._size = [array.size for array in arrays]
        self._first = [0, *itertools.accumulate(map(_aligned, self._size))][:-1]
        self._grows = [name.partition("_")[0] == "cu" for name in _names(padding)]

    def clear(self) -> None:
        """Write padding everywhere. Waits for the device."""
        self._words.copy_(torch.from_numpy(self._padding))

    def fill(self, columns: StepColumns[HostColumn], into: Int32Array) -> None:
        """Write all words of the layout: in every column those of the step, then padding."""
        into[:] = self._padding
        for array, first, size, grows in zip(
            _arrays(columns), self._first, self._size, self._grows, strict=True
        ):
            end = first + array.size
            assert array.size <= size
            into[first:end] = array.view(np.int32)
            if grows:
                into[end : first + size] = array[-1]


class InputBuffer:
    """Words on the device that captured steps read, one step after the other.

    They may be overwritten without waiting: the copy is queued behind the previous step, on the
    stream of everything that reads them.
    """

    def __init__(self, paddings: Iterable[StepColumns[HostColumn]], device: torch.device) -> None:
        self._device = device
        most = max(_size(list(_arrays(tree))) for tree in paddings)
        self.words = torch.zeros(most + _ROOM, dtype=torch.int32, device=device)

    def send(
        self, layout: Layout, columns: StepColumns[HostColumn], extras: Extras[HostColumn]
    ) -> Extras:
        """Fill the layout, copy it to the device, and return `extras` uploaded.

        Extras are part of the same copy if the buffer has room for them.
        """
        arrays = list(_arrays(extras))
        fixed, total = layout.num_words, layout.num_words + _size(arrays)
        if total > len(self.words):
            self.send(layout, columns, Extras())
            return upload(extras, self._device)
        host = _host_words(total, self._device)
        into = host.numpy()
        layout.fill(columns, into[:fixed])
        _pack(arrays, into[fixed:])
        self.words[:total].copy_(host, non_blocking=True)
        sent: Extras = _views(extras, arrays, self.words[fixed:total]) if arrays else Extras()
        return sent


def keep_pinned(most_words: int, device: torch.device) -> None:
    """Fill torch's allocator with pinned memory of all sizes, for the steps that may be in flight.

    It rounds to powers of two. A step that finds none allocates, and the host may have to wait.
    """
    if device.type == "cuda":
        sizes = [1 << power for power in range(most_words.bit_length() + 1)]
        kept = [_host_words(size, device) for size in sizes for _ in range(_IN_FLIGHT)]
        assert all(words.is_pinned() for words in kept)


def _host_words(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


def _size(arrays: Iterable[HostColumn]) -> int:
    return sum(_aligned(array.size) for array in arrays)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pack(arrays: Iterable[HostColumn], into: Int32Array) -> None:
    first = 0
    for array in arrays:
        into[first : first + array.size] = array.view(np.int32).reshape(-1)
        first += _aligned(array.size)


def _views(tree: Tree, arrays: list[HostColumn], words: Tensor) -> Any:
    """Return `tree` with its arrays, packed into words on the device, as tensors."""
    sizes = [_aligned(array.size) for array in arrays]
    tensors = (
        part[: array.size].view(_TYPES[array.dtype]).view(array.shape)
        for array, part in zip(arrays, words.split(sizes), strict=True)
    )
    return _replaced(tree, tensors)


def _arrays(tree: Tree) -> Iterator[HostColumn]:
    for part in tree:
        if isinstance(part, np.ndarray):
            yield part
        elif isinstance(part, tuple):
            yield from _arrays(part)


def _names(tree: Any) -> Iterator[str]:
    """Yield the field names of the arrays of `tree`, in order."""
    for name, part in zip(tree._fields, tree, strict=True):
        if isinstance(part, np.ndarray):
            yield name
        elif isinstance(part, tuple):
            yield from _names(part)


def _replaced(tree: Tree, tensors: Iterator[Tensor]) -> Any:
    def made(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return next(tensors)
        return _replaced(part, tensors) if isinstance(part, tuple) else part

    parts = map(made, tree)
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


class Packed(NamedTuple):
    """Tensors of 32-bit or 64-bit elements, concatenated on the device."""

    words: Tensor  # i32
    parts: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Packed:
        words = torch.cat([part.contiguous().view(torch.int32).reshape(-1) for part in parts])
        return cls(words, tuple((part.shape, part.dtype) for part in parts))


class Download:
    """Packed tensors that are being copied to the host."""

    def __init__(self, packed: Packed) -> None:
        """Queue the copy. What is queued later may overwrite the packed tensors."""
        self._parts = packed.parts
        self._event: torch.cuda.Event | None = None
        self._device = packed.words.device
        if packed.words.is_cuda:
            self._host = torch.empty(packed.words.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(packed.words, non_blocking=True)
            # Blocking: a waiting thread sleeps. One that spins would take a core from every rank.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        else:
            self._host = packed.words.clone()

    @property
    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until the copy is complete, from any thread. Raises errors of the device."""
        if self._event is not None:
            # A new thread is on GPU 0, where waiting would open a context for every rank.
            with torch.cuda.device(self._device):
                self._event.synchronize()

    def tensors(self) -> list[Tensor]:
        assert self.arrived
        sizes = [shape.numel() * dtype.itemsize // 4 for shape, dtype in self._parts]
        # Cloned, because 64-bit elements have to be aligned.
        return [
            part.clone().view(dtype).view(shape)
            for part, (shape, dtype) in zip(self._host.split(sizes), self._parts, strict=True)
        ]
