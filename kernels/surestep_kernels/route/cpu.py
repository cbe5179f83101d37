"""The choice of experts in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, pointers

from .reference import SigmoidChoice


def load(library: Library) -> dict[str, CFunction]:
    """Return the ops of this folder."""
    run = library.long("route", "3P 3l i")
    run_sigmoid = library.long("route_sigmoid", "4P 5l i f")
    return {"route": partial(route, run), "route_sigmoid": partial(route_sigmoid, run_sigmoid)}


def route(run: CFunction, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype is torch.float32
    weights, experts = _empty(tokens, top_k)
    run(*pointers(weights, experts, logits), tokens, num_experts, top_k, int(normalize))
    return weights, experts


def route_sigmoid(run: CFunction, logits: Tensor, how: SigmoidChoice) -> tuple[Tensor, Tensor]:
    tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype is how.bias.dtype is torch.float32
    assert how.bias.shape == (num_experts,)
    weights, experts = _empty(tokens, how.top_k)
    sizes = tokens, num_experts, how.groups, how.kept_groups, how.top_k
    run(*pointers(weights, experts, logits, how.bias), *sizes, int(how.normalize), how.scale)
    return weights, experts


def _empty(tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    return weights, torch.empty(tokens, top_k, dtype=torch.int64)
