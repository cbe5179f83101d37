"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k of the softmax of logits f32[T, E]: weights f32[T, k] and experts i64[T, k].

    They are sorted by weight, the greatest first; of equal ones the lowest index comes first. With
    `normalize` the weights sum to 1.
    """
    weights, experts = torch.sort(logits.softmax(dim=-1), dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts
