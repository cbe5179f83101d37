"""Routing by softmax and by sigmoid."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import assert_rows_alone
from surestep_kernels import KernelSet
from surestep_kernels.route import SigmoidChoice

# NumPy's, as interpreter
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (7, 2), (7, 3), (64, 8)])
def test_softmax_equals_the_reference(
    column: KernelSet, reference: KernelSet, num_experts: int, top_k: int, normalize: bool
) -> None:
    logits = torch.randn(33, num_experts) * 3
    weights, experts = column.route(logits, top_k, normalize=normalize)
    expected, chosen = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)
    assert_rows_alone(column, lambda x: column.route(x, top_k, normalize=normalize), logits)


def test_the_lowest_expert_wins_a_tie(kernels: KernelSet) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0] * 5])
    assert kernels.route(logits, 2, normalize=True)[1].tolist() == [[1, 2], [0, 1]]


def test_what_is_chosen_is_decided_by_logits(kernels: KernelSet) -> None:
    """Not by their softmax, which is 0 for all but one here."""
    logits = torch.tensor([[-300.0, 0.0, -200.0, -150.0]])
    weights, experts = kernels.route(logits, 3, normalize=True)
    assert experts.tolist() == [[1, 3, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_experts_differ_and_exist_whatever_the_logits(kernels: KernelSet, value: float) -> None:
    experts = kernels.route(torch.full((1, 6), value), 4, normalize=True)[1]
    assert experts.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(kernels: KernelSet, value: float, normalize: bool) -> None:
    """A router that computes none would else look like one that trusts no expert."""
    logits = torch.randn(2, 6)
    logits[0, 3] = value
    weights, _ = kernels.route(logits, 4, normalize=normalize)
    assert weights.isnan().any(dim=1).tolist() == [True, False]


def test_no_tokens(column: KernelSet) -> None:
    weights, experts = column.route(torch.empty(0, 6), 4, normalize=True)
    assert weights.shape == experts.shape == (0, 4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"),
    [(7, 1, 1, 3), (24, 4, 2, 5), (64, 8, 4, 8), (256, 8, 4, 8)],
)
def test_sigmoid_equals_the_reference(
    column: KernelSet,
    reference: KernelSet,
    num_experts: int,
    groups: int,
    kept: int,
    top_k: int,
    normalize: bool,
) -> None:
    logits, bias = torch.randn(17, num_experts) * 3, torch.randn(num_experts)
    how = SigmoidChoice(bias, groups, kept, top_k, normalize, 2.5)
    weights, experts = column.route_sigmoid(logits, how)
    expected, chosen = reference.route_sigmoid(logits, how)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)
    assert_rows_alone(column, lambda x: column.route_sigmoid(x, how), logits)


def test_ties_of_groups_and_of_sigmoid_scores(kernels: KernelSet) -> None:
    """The first of equal groups, and the first of equal experts; weights are without the bias."""
    bias = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    how = SigmoidChoice(bias, 3, 1, 2, normalize=True, scale=3.0)
    weights, experts = kernels.route_sigmoid(torch.zeros(1, 6), how)
    assert experts.tolist() == [[2, 3]]
    assert weights.tolist() == [[1.5, 1.5]]


def test_a_sigmoid_score_that_is_no_number_is_not_hidden(kernels: KernelSet) -> None:
    how = SigmoidChoice(torch.zeros(6), 3, 1, 2, normalize=True, scale=1.0)
    logits = torch.zeros(2, 6)
    logits[1, 5] = torch.nan
    weights, experts = kernels.route_sigmoid(logits, how)
    assert weights.isnan().any(dim=1).tolist() == [False, True]
    assert experts.sort(dim=1).values.diff().min() > 0
