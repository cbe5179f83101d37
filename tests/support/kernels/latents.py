"""Sequences of latents or index keys for tests of latent attention."""

from __future__ import annotations

import torch
from support.kernels.cases import row_bounds
from surestep_kernels.latent_attention import store_latents
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8

BLOCK_SIZE, WIDTH, VALUES, KEY, TOP_K = 8, 48, 40, 24, 20
LENGTHS, COUNTS = (75, 7, 41, 600), (12, 7, 1, 5)  # of sequences, and their last tokens that run


class Sequences:
    """Latents or index keys of some sequences on shuffled pages, NaN everywhere else."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        pages = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        free = (torch.randperm(sum(pages)) + 1).int()
        self.tables = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
        self.pages = torch.full((sum(pages) + 2, BLOCK_SIZE, width), torch.nan).to(dtype)
        for row, (count, length) in enumerate(zip(pages, LENGTHS, strict=True)):
            self.tables[row, :count], free = free[:count], free[count:]
            position = torch.arange(length)
            block = self.tables[row, position // BLOCK_SIZE].long()
            slots = block * BLOCK_SIZE + position % BLOCK_SIZE
            store_latents(torch.randn(length, width), self.pages, slots)

    def rows(self) -> AttentionRows:
        """All of them together, in another order than that of the slots."""
        start = torch.tensor(LENGTHS).int() - torch.tensor(COUNTS).int()
        order = torch.tensor([2, 0, 3, 1])
        counts = [COUNTS[i] for i in order.tolist()]
        return AttentionRows(self.tables, order, row_bounds(counts), start[order], max(counts))

    def alone(self, rows: AttentionRows, row: int, token: int) -> AttentionRows:
        """One token of them, as a row of its own."""
        start = rows.start[row : row + 1] + token
        return AttentionRows(self.tables, rows.slots[row : row + 1], row_bounds([1]), start, 1)


def tokens(rows: AttentionRows) -> list[tuple[int, int, int]]:
    """Number, row, and number within the row of every token."""
    borders = rows.cu_rows.tolist()
    return [(t, r, t - borders[r]) for r in range(4) for t in range(borders[r], borders[r + 1])]


TYPES = [  # of queries, and of the pages
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, FP8),
    (torch.bfloat16, FP8),
]
