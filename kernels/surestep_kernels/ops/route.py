"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    """See route_reference."""

    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The top_k of the softmax of logits f32[T, E]: weights f32[T, k] and experts i64[T, k].

    Greatest first, the lowest index winning a tie; `normalize` makes the weights sum to 1.
    """
    weights, experts = torch.sort(logits.softmax(dim=-1), dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts
