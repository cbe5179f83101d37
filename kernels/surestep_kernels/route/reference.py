"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]: ...


class SigmoidChoice(NamedTuple):
    """Choice and weights of experts by sigmoid scores (DeepSeek-V3, 2024, section 2.1.2)."""

    bias: Tensor  # f32[E] of the scores that choose, not of those that weigh
    groups: int  # of E / groups experts each
    kept_groups: int  # whose experts may be chosen
    top_k: int
    normalize: bool  # the weights are divided by their sum
    scale: float  # of the weights


RouteSigmoid = Callable[[Tensor, SigmoidChoice], tuple[Tensor, Tensor]]


def route_reference(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k logits of f32[T, E] as weights f32[T, k] and experts i64[T, k].

    They are sorted, the greatest first; of equal ones the lowest index comes first. The weights are
    the softmax over all experts; `normalize` makes them sum to 1: the softmax over the chosen ones.
    """
    experts = _greatest(logits, top_k)
    weights = logits.softmax(dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, experts


def route_sigmoid_reference(logits: Tensor, how: SigmoidChoice) -> tuple[Tensor, Tensor]:
    """Return weights f32[T, k] and experts i64[T, k] for logits f32[T, E].

    The experts with the greatest biased scores are chosen among the groups whose two best add up to
    the most; of equal ones the lowest index comes first. Their weights are scores without bias, and
    NaN where any score is.
    """
    scores = logits.sigmoid()
    biased = scores + how.bias
    if how.groups > 1:
        grouped = biased.unflatten(1, (how.groups, -1))
        best = _greatest(grouped.topk(2, dim=-1).values.sum(dim=-1), how.kept_groups)
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device)
        kept.scatter_(1, best, value=True)
        biased = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    experts = _greatest(biased, how.top_k)
    weights = scores.gather(1, experts)
    if how.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    spoilt = scores.isnan().any(dim=1, keepdim=True)
    return (weights * how.scale).masked_fill(spoilt, float("nan")), experts.contiguous()


def _greatest(x: Tensor, count: int) -> Tensor:
    """Return the indices i64[T, count] of the greatest of x [T, N], of equal ones the lowest."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :count]
