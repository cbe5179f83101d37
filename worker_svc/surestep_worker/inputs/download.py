"""From tensors on the device to tensors on the host: one copy, and an event at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
        """Whether `wait` would return at once."""
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
