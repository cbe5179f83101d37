"""Copies between lines of caches, which are spread over many pages, and bytes on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from surestep_common.invariants import IntArray
from torch import Tensor

_WORD = 8  # bytes


class Lines:
    """Pages [L, ...] of which line i together is block or snapshot i."""

    def __init__(self, pages: Sequence[Tensor]) -> None:
        self._pages = [_as_words(page) for page in pages]
        self._device = pages[0].device if pages else torch.device("cpu")
        self._parts = list[slice]()  # of the bytes of a line, by page
        end = 0
        for page in self._pages:
            self._parts.append(slice(end, end + page[0].nbytes))
            end += page[0].nbytes + -page[0].nbytes % _WORD
        self.nbytes = end  # of a line
        self._stream: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def read(self, lines: IntArray) -> list[Tensor]:
        """Return the bytes u8[nbytes] of each line, when the device has copied them."""
        if self._device.type == "cpu":
            return [self._read_one(line) for line in lines.tolist()]
        index = torch.from_numpy(lines).to(self._device)
        with self._on_device():
            staged = torch.zeros((len(lines), self.nbytes), dtype=torch.uint8, device=self._device)
            for page, part in zip(self._pages, self._parts, strict=True):
                staged[:, part].view(page.dtype).copy_(page.index_select(0, index))
            host = staged.cpu()
        return [line.clone() for line in host]

    def _read_one(self, line: int) -> Tensor:
        data = torch.zeros(self.nbytes, dtype=torch.uint8)
        for page, part in zip(self._pages, self._parts, strict=True):
            data[part].view(page.dtype).copy_(page[line])
        return data

    @torch.inference_mode()
    def write(self, lines: IntArray, content: Sequence[Tensor]) -> None:
        """Write the bytes u8[nbytes] of each line; return when the device has them."""
        if self._device.type == "cpu":
            for line, data in zip(lines.tolist(), content, strict=True):
                for page, part in zip(self._pages, self._parts, strict=True):
                    page[line].copy_(data[part].view(page.dtype))
            return
        index = torch.from_numpy(lines).to(self._device)
        with self._on_device():
            staged = torch.stack(list(content)).to(self._device)
            for page, part in zip(self._pages, self._parts, strict=True):
                page.index_copy_(0, index, staged[:, part].view(page.dtype))

    def _on_device(self) -> _Stream:
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return _Stream(self._stream)


class _Stream:
    """Copies beside the steps, which are done at the end."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream) if stream is not None else None

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None and self._stream is not None:
            self._stream.synchronize()
            self._context.__exit__(*error)


def _as_words(page: Tensor) -> Tensor:
    """Return the same memory as [L, N] of the widest type that fills a line."""
    flat = page.view(len(page), -1)
    width = torch.int64 if flat[0].nbytes % _WORD == 0 else torch.uint8
    return flat.view(width)
