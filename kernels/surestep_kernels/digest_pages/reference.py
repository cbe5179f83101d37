"""Fletcher's checksum of pages, in eight lanes of 64-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_LANES = 8
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class DigestPages(Protocol):
    """Compute digest_pages_reference."""

    def __call__(self, pages: Sequence[Tensor], lines: Tensor) -> Tensor: ...


def digest_pages_reference(pages: Sequence[Tensor], lines: Tensor) -> Tensor:
    """Return a digest i64[N] of each line of `lines` i64[N], over all `pages` [L, ...].

    The bytes of a line are read as rows of eight words, those of each page filled up with zeros.
    Per lane the sum of the words, and the sum of these sums behind each row, are mixed with the
    number of the line. Any change within one word changes the digest.
    """
    digests = [_digest([page[line] for page in pages], line) for line in lines.tolist()]
    return torch.tensor(digests, dtype=torch.int64)


def _digest(parts: Sequence[Tensor], line: int) -> int:
    rows = torch.cat([_rows(part) for part in parts])
    sums, behind = rows.sum(dim=0), rows.cumsum(dim=0).sum(dim=0)
    digest = torch.tensor(line)
    for word in (*sums, *behind):
        digest = (digest ^ word) * _ODD
        digest = digest ^ ((digest >> 32) & 0xFFFFFFFF)
    return int(digest)


def _rows(part: Tensor) -> Tensor:
    """Return the bytes of a page as words i64[..., 8]."""
    data = part.contiguous().flatten().view(torch.uint8)
    return functional.pad(data, (0, -len(data) % 64)).view(torch.int64).view(-1, _LANES)
