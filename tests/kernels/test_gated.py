"""Gated norm, output gate and routing by softmax and by sigmoid."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.route import SigmoidChoice


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_gated(native: KernelSet, reference: KernelSet, dtype: torch.dtype) -> None:
    x, projection = torch.randn(37, 3, 24).to(dtype), torch.randn(37, 100).to(dtype)
    gate, weight = projection[:, 9:81].view(37, 3, 24), torch.randn(24)
    out = native.rms_norm_gated(x, gate, weight, 1e-6)
    assert_close(out, reference.rms_norm_gated(x, gate, weight, 1e-6))
    rows = [native.rms_norm_gated(x[i : i + 1], gate[i : i + 1], weight, 1e-6) for i in range(37)]
    assert torch.equal(out, torch.cat(rows))


@pytest.mark.parametrize("gate_width", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mul_sigmoid(
    native: KernelSet, reference: KernelSet, gate_width: int, dtype: torch.dtype
) -> None:
    x, projection = torch.randn(37, 40).to(dtype), torch.randn(37, 64).to(dtype)
    gate = projection[:, 3 : 3 + gate_width]
    alone = [row.clone() for row in x.split(1)]
    expected = x.clone()
    native.mul_sigmoid(x, gate)
    reference.mul_sigmoid(expected, gate)
    assert_close(x, expected)
    for i, row in enumerate(alone):
        native.mul_sigmoid(row, gate[i : i + 1])
    assert torch.equal(x, torch.cat(alone))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (7, 2), (64, 8)])
def test_route(
    native: KernelSet, reference: KernelSet, num_experts: int, top_k: int, normalize: bool
) -> None:
    logits = torch.randn(33, num_experts) * 3
    weights, experts = native.route(logits, top_k, normalize=normalize)
    expected, chosen = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)
    alone = [native.route(row, top_k, normalize=normalize)[0] for row in logits.split(1)]
    assert torch.equal(weights, torch.cat(alone))


def test_the_lowest_expert_wins_a_tie(native: KernelSet, reference: KernelSet) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]])
    for kernels in (native, reference):
        assert kernels.route(logits, 2, normalize=True)[1].tolist() == [[1, 2]]


def test_what_is_chosen_is_decided_by_logits(native: KernelSet, reference: KernelSet) -> None:
    """Not by their softmax, which is 0 for all but one here."""
    logits = torch.tensor([[-300.0, 0.0, -200.0, -150.0]])
    for kernels in (native, reference):
        weights, experts = kernels.route(logits, 3, normalize=True)
        assert experts.tolist() == [[1, 3, 2]]
        assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"), [(7, 1, 1, 3), (24, 4, 2, 5), (256, 8, 4, 8)]
)
def test_route_sigmoid(
    native: KernelSet,
    reference: KernelSet,
    num_experts: int,
    groups: int,
    kept: int,
    top_k: int,
    normalize: bool,
) -> None:
    logits, bias = torch.randn(33, num_experts) * 3, torch.randn(num_experts)
    how = SigmoidChoice(bias, groups, kept, top_k, normalize, 2.5)
    weights, experts = native.route_sigmoid(logits, how)
    expected, chosen = reference.route_sigmoid(logits, how)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)
    alone = [native.route_sigmoid(row, how)[0] for row in logits.split(1)]
    assert torch.equal(weights, torch.cat(alone))


def test_ties_of_groups_and_of_experts(native: KernelSet, reference: KernelSet) -> None:
    """The first of equal groups, and the first of equal experts; weights are without the bias."""
    bias = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    how = SigmoidChoice(bias, 3, 1, 2, normalize=True, scale=3.0)
    for kernels in (native, reference):
        weights, experts = kernels.route_sigmoid(torch.zeros(1, 6), how)
        assert experts.tolist() == [[2, 3]]
        assert weights.tolist() == [[1.5, 1.5]]


def test_a_score_that_is_no_number_is_not_hidden(native: KernelSet, reference: KernelSet) -> None:
    how = SigmoidChoice(torch.zeros(6), 3, 1, 2, normalize=True, scale=1.0)
    logits = torch.zeros(2, 6)
    logits[1, 5] = torch.nan
    for kernels in (native, reference):
        weights, experts = kernels.route_sigmoid(logits, how)
        assert weights.isnan().any(dim=1).tolist() == [False, True]
        assert experts.sort(dim=1).values.diff().min() > 0
