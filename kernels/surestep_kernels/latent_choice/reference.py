"""The positions that latent attention reads (DeepSeek-V3.2, 2025, section 2.1)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from surestep_kernels.latent_attention import read_latents, tokens_of
from surestep_kernels.paged_attention import AttentionRows


class LatentChoice(Protocol):
    def __call__(
        self, q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int
    ) -> Tensor: ...


def latent_choice_reference(
    q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int
) -> Tensor:
    """Choose the positions that tokens attend to: i32[T, top_k], in ascending order.

    The score of a position is the sum over heads of weights f32[T, H] times what is positive of the
    product of q [T, H, D] and its index key. The greatest scores win, of equal ones the lowest
    positions; tokens that see no more than top_k positions see them all.
    """
    chosen = torch.zeros(len(q), top_k, dtype=torch.int32, device=q.device)
    for token, positions, table in tokens_of(rows):
        best = positions
        if len(positions) > top_k:
            products = q[token].float() @ read_latents(pages, table, positions).T  # [H, L]
            scores = weights[token] @ products.relu()
            order = torch.sort(scores, descending=True, stable=True).indices
            best = order[:top_k].sort().values
        chosen[token, : len(best)] = best.int()
    return chosen
