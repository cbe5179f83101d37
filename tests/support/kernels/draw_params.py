"""Columns of sampling parameters, as the host sends them to a device."""

from __future__ import annotations

import math

import torch
from surestep_kernels.choose import DrawParams
from torch import Tensor

OFF = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}


def make_params(cases: list[tuple[float, dict[str, float]]], vocab: int) -> DrawParams:
    """One window per case of temperature and rules, each with a seed of 64 bits."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    seeds = torch.randint(-(2**63), 2**63 - 1, (len(cases),))
    rules = [rule for _, rule in cases]
    return DrawParams(
        temperature=column([t for t, _ in cases], torch.float32),
        seed_low=seeds.view(torch.int32)[0::2].clone(),
        seed_high=seeds.view(torch.int32)[1::2].clone(),
        max_gap=column([_max_gap(r["min_p"]) for r in rules], torch.float32),
        top_k=column([r["top_k"] or vocab for r in rules], torch.int32),
        top_p=column([r["top_p"] if r["top_p"] < 1 else math.inf for r in rules], torch.float32),
    )


def to(params: DrawParams, device: str) -> DrawParams:
    return DrawParams(*(column.to(device) for column in params))


def _max_gap(min_p: float) -> float:
    return 0.0 - math.log(min_p) if min_p > 0 else math.inf
