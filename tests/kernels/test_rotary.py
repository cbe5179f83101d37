from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.rotary import Sections, section_axes
from torch import Tensor

MAX_POSITION = 300
TOKENS = 11


def rotation_table(rotated: int) -> Tensor:
    """cos_sin f32[P, D'] as a model makes it."""
    frequency = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(9, 3, 64, 64), (2, 2, 6, 6), (4, 1, 24, 10), (3, 1, 64, 16), (1, 1, 5, 2)],
)
def test_equals_the_reference_on_slices_of_a_projection(
    column: KernelSet,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn(TOKENS, heads + 2 * kv_heads, head_dim).to(dtype)
    before, expected = qkv.clone(), qkv.clone()
    positions, table = torch.randint(1, MAX_POSITION, (TOKENS,)), rotation_table(rotated)
    for kernels, tensor in ((column, qkv), (reference, expected)):
        q, k, _ = tensor.split((heads, kv_heads, kv_heads), dim=1)
        kernels.rotary(q, k, positions, table)
    assert_close(qkv, expected)
    turned = heads + kv_heads
    assert torch.equal(qkv[:, turned:], before[:, turned:])
    assert torch.equal(qkv[..., rotated:], before[..., rotated:])
    assert not torch.equal(qkv[:, :turned, :rotated], before[:, :turned, :rotated])


def test_position_zero_changes_nothing_and_lengths_are_kept(kernels: KernelSet) -> None:
    q, k = torch.randn(2, 4, 64), torch.randn(2, 2, 64)
    before = q.clone()
    kernels.rotary(q, k, torch.tensor([0, 123]), rotation_table(64))
    assert torch.equal(q[0], before[0])
    assert not torch.equal(q[1], before[1])
    torch.testing.assert_close(q.norm(dim=-1), before.norm(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(column: KernelSet, dtype: torch.dtype) -> None:
    tokens = 24  # of several tasks
    q, k = torch.randn(tokens, 9, 64).to(dtype), torch.randn(tokens, 3, 64).to(dtype)
    alone_q, alone_k = q.clone(), k.clone()
    positions, table = torch.randint(0, MAX_POSITION, (tokens,)), rotation_table(64)
    column.set_num_threads(2)
    column.rotary(q, k, positions, table)
    for i in range(tokens):
        column.rotary(alone_q[i : i + 1], alone_k[i : i + 1], positions[i : i + 1], table)
    assert torch.equal(q, alone_q)
    assert torch.equal(k, alone_k)


@pytest.mark.parametrize("sections", [(3, 2, 2), (4, 4, 3), (2, 1, 1)])
@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_sections_equal_the_reference(
    column: KernelSet, reference: KernelSet, sections: Sections
) -> None:
    rotated = 2 * sum(sections)
    q, k = torch.randn(TOKENS, 3, rotated + 2), torch.randn(TOKENS, 1, rotated + 2)
    positions, table = torch.randint(0, MAX_POSITION, (3, TOKENS)), rotation_table(rotated)
    made = q.clone(), k.clone()
    column.rotary(*made, positions, table, sections)
    reference.rotary(q, k, positions, table, sections)
    assert_close(made[0], q)
    assert_close(made[1], k)


@pytest.mark.parametrize("kernels", ["reference", "triton"], indirect=True)
def test_text_with_sections_is_as_without(kernels: KernelSet) -> None:
    q, k = torch.randn(TOKENS, 2, 32), torch.randn(TOKENS, 1, 32)
    positions, table = torch.randint(0, MAX_POSITION, (TOKENS,)), rotation_table(22)
    plain, sectioned = ((q.clone(), k.clone()) for _ in range(2))
    kernels.rotary(*plain, positions, table)
    kernels.rotary(*sectioned, positions.expand(3, -1).contiguous(), table, (4, 4, 3))
    assert torch.equal(plain[0], sectioned[0])
    assert torch.equal(plain[1], sectioned[1])


@pytest.mark.parametrize("sections", [(11, 11, 10), (24, 20, 20), (2, 1, 1)])
def test_sections_lie_as_in_transformers(sections: Sections) -> None:
    """Its function is given, for each axis, frequencies that name the axis."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    owner: Any = SimpleNamespace(mrope_section=sections)
    named = torch.arange(3).view(3, 1, 1, 1).repeat(1, 1, 1, sum(sections))
    theirs = Qwen3_5TextRotaryEmbedding.recomposition_frequencies(owner, named)
    assert theirs.flatten()[: sum(sections)].tolist() == section_axes(sections).tolist()


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_positions_out_of_bounds_stay_in_the_table(column: KernelSet) -> None:
    """Rows of padding may hold anything."""
    table, q, k = rotation_table(8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    expected = q.clone(), k.clone()
    column.rotary(q, k, torch.tensor([-(1 << 40), 1 << 40]), table)
    column.rotary(*expected, torch.tensor([0, MAX_POSITION - 1]), table)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_sections_are_not_for_the_cpu(native: KernelSet) -> None:
    q, k = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    with pytest.raises(AssertionError):
        native.rotary(q, k, torch.zeros(3, 2, dtype=torch.int64), rotation_table(8), (2, 1, 1))
