from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from torch import Tensor

MAX_POSITION = 300


def rotation_table(head_dim: int) -> Tensor:
    """cos_sin f32[P, D] as a model makes it."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 6), (4, 1, 24)])
def test_equals_the_reference_on_slices_of_a_projection(
    native: KernelSet,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn(11, heads + 2 * kv_heads, head_dim).to(dtype)
    expected = qkv.clone()
    positions, table = torch.randint(0, MAX_POSITION, (11,)), rotation_table(head_dim)
    for kernels, tensor in ((native, qkv), (reference, expected)):
        q, k, _ = tensor.split((heads, kv_heads, kv_heads), dim=1)
        kernels.rotary(q, k, positions, table)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, heads + kv_heads :], expected[:, heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_rotation_leaves_the_rest_of_each_head(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype
) -> None:
    q, k = torch.randn(7, 3, 64).to(dtype), torch.randn(7, 1, 64).to(dtype)
    q_expected, k_expected = q.clone(), k.clone()
    before, positions, table = q.clone(), torch.arange(1, 8), rotation_table(16)
    native.rotary(q, k, positions, table)
    reference.rotary(q_expected, k_expected, positions, table)
    assert_close(q, q_expected)
    assert_close(k, k_expected)
    assert torch.equal(q[..., 16:], before[..., 16:])
    assert not torch.equal(q[..., :16], before[..., :16])


def test_position_zero_changes_nothing_and_lengths_are_kept(native: KernelSet) -> None:
    q, k = torch.randn(2, 4, 64), torch.randn(2, 2, 64)
    before = q.clone()
    native.rotary(q, k, torch.tensor([0, 123]), rotation_table(64))
    assert torch.equal(q[0], before[0])
    assert not torch.equal(q[1], before[1])
    torch.testing.assert_close(q.norm(dim=-1), before.norm(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(native: KernelSet, dtype: torch.dtype) -> None:
    q, k = torch.randn(100, 9, 64).to(dtype), torch.randn(100, 3, 64).to(dtype)
    alone_q, alone_k = q.clone(), k.clone()
    positions, table = torch.randint(0, MAX_POSITION, (100,)), rotation_table(64)
    native.set_num_threads(2)
    native.rotary(q, k, positions, table)
    for i in range(100):
        native.rotary(alone_q[i : i + 1], alone_k[i : i + 1], positions[i : i + 1], table)
    assert torch.equal(q, alone_q)
    assert torch.equal(k, alone_k)


def test_sections_are_not_for_the_cpu(native: KernelSet) -> None:
    q, k = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    with pytest.raises(AssertionError):
        native.rotary(q, k, torch.zeros(3, 2, dtype=torch.int64), rotation_table(8), (2, 1, 1))
