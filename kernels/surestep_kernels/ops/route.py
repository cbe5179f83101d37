"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k logits of f32[T, E] by their softmax: weights f32[T, k], experts i64[T, k].

    They are sorted by weight, the greatest first; of equal ones the lowest index comes first. The
    softmax is over all experts; with `normalize` the weights sum to 1, as if it were over those.
    """
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts
