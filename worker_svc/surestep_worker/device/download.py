"""From tensors on the device to words on the host: one copy, and an event that says when."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Words:
    """Words that are on their way."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Tensors of 32-bit or 64-bit elements, copied behind whatever is queued."""
        self._shapes = [(part.shape, part.dtype) for part in parts]
        words = torch.cat([part.contiguous().view(torch.int32).reshape(-1) for part in parts])
        self._event: torch.cuda.Event | None = None
        self._host = words
        if words.is_cuda:
            self._host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(words, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

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
        sizes = [shape.numel() * dtype.itemsize // 4 for shape, dtype in self._shapes]
        # Copied: 64-bit elements have to be aligned.
        return [
            part.clone().view(dtype).view(shape)
            for part, (shape, dtype) in zip(self._host.split(sizes), self._shapes, strict=True)
        ]
