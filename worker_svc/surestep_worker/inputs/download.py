"""From tensors on the device to words on the host: one copy, and an event that says when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Tensors of 32-bit or 64-bit elements behind each other, on the device."""

    words: Tensor  # i32
    parts: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Packed:
        """One launch."""
        words = torch.cat([part.contiguous().view(torch.int32).reshape(-1) for part in parts])
        return cls(words, tuple((part.shape, part.dtype) for part in parts))


class Download:
    """Packed tensors that are being copied to the host."""

    def __init__(self, packed: Packed) -> None:
        """Copied behind whatever is queued: they may be overwritten by what is queued later."""
        self._parts = packed.parts
        self._event: torch.cuda.Event | None = None
        if packed.words.is_cuda:
            self._host = torch.empty(packed.words.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(packed.words, non_blocking=True)
            # Blocking: who waits sleeps. A thread that spins would take a core from each rank.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        else:
            self._host = packed.words.clone()

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when the words are there; any thread may wait. Raises what the device met."""
        if self._event is not None:
            self._event.synchronize()

    def tensors(self) -> list[Tensor]:
        """The tensors, on the host."""
        assert self.arrived
        sizes = [shape.numel() * dtype.itemsize // 4 for shape, dtype in self._parts]
        # Copied: 64-bit elements have to be aligned.
        return [
            part.clone().view(dtype).view(shape)
            for part, (shape, dtype) in zip(self._host.split(sizes), self._parts, strict=True)
        ]
