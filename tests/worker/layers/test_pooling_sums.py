"""Sums of hidden states: exact enough, and the same bits in any order and any parts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surestep_worker.configs.rope import MAX_POSITION
from surestep_worker.layers.pooling import PoolingSums

CPU = torch.device("cpu")


def mean_of(
    hidden: torch.Tensor, cuts: list[int], order: torch.Tensor, bound: float
) -> torch.Tensor:
    """The mean of [T, H], added in parts, in another order, beside another slot's."""
    sums = PoolingSums(3, hidden.shape[1], bound, CPU)
    sums.admit(1)
    edges = sorted({0, *(cut % (len(hidden) + 1) for cut in cuts), len(hidden)})
    for begin, end in pairwise(edges):
        part = hidden[order[begin:end]]
        slot = torch.tensor([0, 1]).repeat(end - begin)
        sums.add(slot, torch.stack((part * 3, part), dim=1).flatten(0, 1))
    return sums.mean(torch.tensor([1]), torch.tensor([len(hidden)]))[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.lists(st.integers(0, 10**6), max_size=5),
    st.integers(0, 999),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_parts_and_order_change_no_bit(
    length: int, cuts: list[int], seed: int, dtype: torch.dtype, size: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(length, 16, generator=random) * size).to(dtype)
    bound = float(hidden.abs().max()) * 4
    whole = mean_of(hidden, [], torch.arange(length), bound)
    order = torch.randperm(length, generator=random)
    assert torch.equal(mean_of(hidden, cuts, order, bound), whole)
    exact = hidden.double().mean(dim=0)
    assert (whole.double() - exact).abs().max() <= 1e-7 * size * 4


def test_a_token_alone_keeps_all_its_bits_but_those_that_do_not_count() -> None:
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    found = mean_of(hidden, [], torch.arange(1), bound=64.0)
    assert torch.allclose(found, hidden[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("bound", [1e-30, 1.0, 3e4, 1e30])
def test_the_longest_prompt_of_the_greatest_numbers_fits(bound: float) -> None:
    sums = PoolingSums(1, 2, bound, CPU)
    sums._sums[0, :2] = int(bound * sums._scale) * MAX_POSITION
    mean = sums.mean(torch.tensor([0]), torch.tensor([MAX_POSITION]))
    assert torch.allclose(mean, torch.full((1, 2), bound), rtol=1e-6) or bound < 2.0**-64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_own_slot_until_the_next_prompt(bad: float) -> None:
    sums = PoolingSums(2, 4, 8.0, CPU)
    hidden = torch.ones(4, 4)
    hidden[2, 1] = bad
    sums.add(torch.tensor([0, 1, 1, 0]), hidden)
    mean = sums.mean(torch.tensor([0, 1]), torch.tensor([2, 2]))
    assert torch.equal(mean[0], torch.ones(4))
    assert mean[1].isnan().all()
    sums.admit(1)
    sums.add(torch.tensor([1]), torch.ones(1, 4))
    assert torch.equal(sums.mean(torch.tensor([1]), torch.tensor([1]))[0], torch.ones(4))


def test_a_model_that_is_no_numbers_has_no_bound() -> None:
    sums = PoolingSums(1, 2, math.nan, CPU)
    sums.add(torch.tensor([0]), torch.full((1, 2), math.nan))
    assert sums.mean(torch.tensor([0]), torch.tensor([1])).isnan().all()
