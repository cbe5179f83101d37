from __future__ import annotations

import pytest
import torch
from surestep_kernels import KernelSet
from surestep_kernels.route import SigmoidChoice
from surestep_kernels.route.triton import route, route_sigmoid


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (7, 3), (64, 8)])
def test_equals_the_reference(
    gpu: str, reference: KernelSet, num_experts: int, top_k: int, normalize: bool
) -> None:
    logits = torch.randn(13, num_experts) * 3
    weights, experts = route(logits.to(gpu), top_k, normalize=normalize)
    expected, chosen = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(experts.cpu(), chosen)
    torch.testing.assert_close(weights.cpu(), expected)
    alone = [route(row.to(gpu), top_k, normalize=normalize)[0] for row in logits.split(1)]
    assert torch.equal(weights, torch.cat(alone))


def test_the_lowest_expert_wins_a_tie(gpu: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0] * 5])
    assert route(logits.to(gpu), 2, normalize=True)[1].tolist() == [[1, 2], [0, 1]]


def test_what_is_chosen_is_decided_by_logits(gpu: str) -> None:
    """Not by their softmax, which is 0 for all but one here."""
    weights, experts = route(
        torch.tensor([[-300.0, 0.0, -200.0, -150.0]]).to(gpu), 3, normalize=True
    )
    assert experts.tolist() == [[1, 3, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, as interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_experts_differ_and_exist_whatever_the_logits(gpu: str, value: float) -> None:
    logits = torch.full((1, 6), value, device=gpu)
    assert route(logits, 4, normalize=True)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, as interpreter
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(
    gpu: str, reference: KernelSet, value: float, normalize: bool
) -> None:
    """A router that computes none would else look like one that trusts no expert."""
    logits = torch.randn(2, 6)
    logits[0, 3] = value
    weights, _ = route(logits.to(gpu), 4, normalize=normalize)
    expected, _ = reference.route(logits, 4, normalize=normalize)
    assert weights.isnan().any(dim=1).tolist() == [True, False]
    assert expected.isnan().any(dim=1).tolist() == [True, False]


def test_no_tokens(gpu: str) -> None:
    weights, experts = route(torch.empty(0, 6, device=gpu), 4, normalize=True)
    assert weights.shape == experts.shape == (0, 4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"), [(7, 1, 1, 3), (24, 4, 2, 5), (64, 8, 4, 8)]
)
def test_sigmoid_scores(
    gpu: str,
    reference: KernelSet,
    num_experts: int,
    groups: int,
    kept: int,
    top_k: int,
    normalize: bool,
) -> None:
    logits, bias = torch.randn(13, num_experts) * 3, torch.randn(num_experts)
    how = SigmoidChoice(bias, groups, kept, top_k, normalize, 2.5)
    expected, chosen = reference.route_sigmoid(logits, how)
    how = how._replace(bias=bias.to(gpu))
    weights, experts = route_sigmoid(logits.to(gpu), how)
    assert torch.equal(experts.cpu(), chosen)
    torch.testing.assert_close(weights.cpu(), expected)
    alone = [route_sigmoid(row.to(gpu), how)[0] for row in logits.split(1)]
    assert torch.equal(weights, torch.cat(alone))


def test_ties_of_groups_and_of_sigmoid_scores(gpu: str) -> None:
    bias = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], device=gpu)
    how = SigmoidChoice(bias, 3, 1, 2, normalize=True, scale=3.0)
    weights, experts = route_sigmoid(torch.zeros(1, 6, device=gpu), how)
    assert experts.tolist() == [[2, 3]]
    assert weights.tolist() == [[1.5, 1.5]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, as interpreter
def test_a_sigmoid_score_that_is_no_number_is_not_hidden(gpu: str) -> None:
    how = SigmoidChoice(torch.zeros(6, device=gpu), 3, 1, 2, normalize=True, scale=1.0)
    logits = torch.zeros(2, 6)
    logits[1, 5] = torch.nan
    weights, experts = route_sigmoid(logits.to(gpu), how)
    assert weights.isnan().any(dim=1).tolist() == [False, True]
    assert experts.sort(dim=1).values.diff().min() > 0
