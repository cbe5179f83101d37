"""The sampler draws from the distribution it claims to draw from, and draws independently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.kernels.step_sampling import sample
from support.references.gumbel_draw import gumbel_argmax
from support.references.sampling import distribution, params
from surestep_proto import sampling_pb2 as pb
from surestep_worker.step.sampling import SamplingTable

V, DRAWS = 16, 400_000
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(7)) * 1.5

CASES = {
    "temperature 1": params(temperature=1.0, seed=1),
    "temperature .7": params(temperature=0.7, seed=2**64 - 1),
    "top_k": params(temperature=1.0, top_k=5, seed=3),
    "top_p": params(temperature=1.2, top_p=0.8, seed=4),
    "min_p": params(temperature=1.5, min_p=0.1, seed=5),
    "all": params(temperature=1.1, min_p=0.02, top_k=9, top_p=0.9, seed=6),
    "bias": params(temperature=1.0, logit_bias={0: 2.0}, allowed_token_ids=[0, 1, 2, 9], seed=7),
}


def _draws(p: pb.SamplingParams) -> torch.Tensor:
    """One token at each of DRAWS consecutive positions."""
    slots = SamplingTable(1, V)
    slots.admit(0, p, 1)
    slot = torch.zeros(DRAWS, dtype=torch.int64)
    tokens = torch.zeros(1, 1, dtype=torch.int32)
    return sample(LOGITS.expand(DRAWS, V), slot, torch.arange(DRAWS), tokens, slots).ids.long()


def _total_variation(ids: torch.Tensor, exact: list[float]) -> float:
    seen = torch.bincount(ids, minlength=V).double() / ids.numel()
    return 0.5 * (seen - torch.tensor(exact).double()).abs().sum().item()


def _pairs_chi_square(ids: torch.Tensor, exact: list[float]) -> float:
    """Standard deviations by which non-overlapping consecutive pairs miss independence."""
    pairs = torch.bincount(ids[0::2] * V + ids[1::2], minlength=V * V).double()
    p = torch.tensor(exact).double()
    expected = (p.unsqueeze(1) * p).flatten() * (ids.numel() // 2)
    likely = expected > 5
    chi_square = ((pairs - expected)[likely] ** 2 / expected[likely]).sum().item()
    freedom = int(likely.sum()) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", CASES)
def test_total_variation(name: str) -> None:
    p = CASES[name]
    exact = distribution(
        [
            x + p.logit_bias.get(i, 0.0)
            if not p.allowed_token_ids or i in p.allowed_token_ids
            else -math.inf
            for i, x in enumerate(LOGITS.tolist())
        ],
        p,
    )
    ids = _draws(p)
    assert _total_variation(ids, exact) < 0.005
    assert abs(_pairs_chi_square(ids, exact)) < 5


def test_seeds_are_independent_streams() -> None:
    """The same position under consecutive seeds, as many requests of one client may have."""
    exact = distribution(LOGITS.tolist(), params(temperature=1.0))
    position = torch.full((DRAWS,), 17)
    ids = gumbel_argmax(LOGITS.expand(DRAWS, V), torch.arange(DRAWS), position)
    assert _total_variation(ids, exact) < 0.005
    assert abs(_pairs_chi_square(ids, exact)) < 5


MUTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "noise without position": lambda positions: positions * 0,
    "noise shared by two positions": lambda positions: positions // 2,
    "noise of period 1000": lambda positions: positions % 1000,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_reused_noise_would_be_seen(name: str) -> None:
    """The check of the checks: noise that serves twice fails them."""
    exact = distribution(LOGITS.tolist(), params(temperature=1.0))
    positions = MUTANTS[name](torch.arange(DRAWS))
    ids = gumbel_argmax(LOGITS.expand(DRAWS, V), torch.zeros_like(positions), positions)
    assert _total_variation(ids, exact) > 0.005 or abs(_pairs_chi_square(ids, exact)) > 5
