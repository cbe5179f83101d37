"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k logits of f32[T, E] as weights f32[T, k] and experts i64[T, k].

    They are sorted, the greatest first; of equal ones the lowest index comes first. The weights are
    the softmax over all experts; `normalize` makes them sum to 1: the softmax over the chosen ones.
    """
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts
