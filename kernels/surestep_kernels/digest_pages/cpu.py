"""Digests of pages in C."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, pointers


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    return {"digest_pages": partial(digest_pages, library.long("digest_pages", "4P 2l"))}


def digest_pages(run: CFunction, pages: Sequence[Tensor], lines: Tensor) -> Tensor:
    assert lines.dtype is torch.int64
    assert all(page.is_contiguous() for page in pages)
    sizes = torch.tensor([page[0].nbytes for page in pages])
    places = torch.tensor(pointers(*pages))
    digests = torch.empty(len(lines), dtype=torch.int64)
    run(*pointers(digests, lines.contiguous(), places, sizes), len(lines), len(pages))
    return digests
