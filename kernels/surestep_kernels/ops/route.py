"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    """See route_reference."""

    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The top_k logits of f32[T, E] and their softmax: weights f32[T, k] and experts i64[T, k].

    Greatest first, the lowest index winning a tie. The softmax is over all experts; `normalize`
    makes the weights sum to 1, which is the softmax over the chosen ones.
    """
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts
