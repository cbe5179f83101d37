from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.rotary import Sections, section_axes
from surestep_kernels.rotary.triton import rotary
from torch import Tensor

MAX_POSITION = 300
TOKENS = 5


def rotation_table(rotated: int) -> Tensor:
    """cos_sin f32[P, D'] as a model makes it."""
    frequency = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angle = torch.arange(MAX_POSITION)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(9, 3, 64, 64), (2, 2, 6, 6), (4, 1, 24, 10), (1, 1, 5, 2)],
)
def test_equals_the_reference_on_slices_of_a_projection(
    gpu: str,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    dtype: torch.dtype,
) -> None:
    expected = torch.randn(TOKENS, heads + 2 * kv_heads, head_dim).to(dtype)
    positions, table = torch.randint(0, MAX_POSITION, (TOKENS,)), rotation_table(rotated)
    qkv = expected.to(gpu, copy=True)
    sizes = heads, kv_heads, kv_heads
    q, k, _ = qkv.split(sizes, dim=1)
    rotary(q, k, positions.to(gpu), table.to(gpu))
    before = expected.clone()
    q, k, _ = expected.split(sizes, dim=1)
    reference.rotary(q, k, positions, table)
    assert_close(qkv.cpu(), expected)
    assert torch.equal(qkv[..., rotated:].cpu(), before[..., rotated:])
    assert torch.equal(qkv[:, heads + kv_heads :].cpu(), before[:, heads + kv_heads :])


@pytest.mark.parametrize("sections", [(3, 2, 2), (4, 4, 3), (2, 1, 1)])
def test_sections_equal_the_reference(gpu: str, reference: KernelSet, sections: Sections) -> None:
    rotated = 2 * sum(sections)
    q, k = torch.randn(TOKENS, 3, rotated + 2), torch.randn(TOKENS, 1, rotated + 2)
    positions, table = torch.randint(0, MAX_POSITION, (3, TOKENS)), rotation_table(rotated)
    on_gpu = q.to(gpu, copy=True), k.to(gpu, copy=True)
    rotary(*on_gpu, positions.to(gpu), table.to(gpu), sections)
    reference.rotary(q, k, positions, table, sections)
    assert_close(on_gpu[0].cpu(), q)
    assert_close(on_gpu[1].cpu(), k)


def test_text_with_sections_is_as_without(gpu: str, reference: KernelSet) -> None:
    q, k = torch.randn(TOKENS, 2, 32), torch.randn(TOKENS, 1, 32)
    positions, table = torch.randint(0, MAX_POSITION, (TOKENS,)), rotation_table(22)
    for op, device in ((rotary, gpu), (reference.rotary, "cpu")):
        plain, sectioned = ((q.to(device, copy=True), k.to(device, copy=True)) for _ in range(2))
        inputs = positions.to(device), table.to(device)
        op(*plain, *inputs)
        op(*sectioned, inputs[0].expand(3, -1).contiguous(), inputs[1], (4, 4, 3))
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


def test_positions_out_of_bounds_stay_in_the_table(gpu: str) -> None:
    """Rows of padding may hold anything."""
    table = rotation_table(8).to(gpu)
    q, k = torch.randn(2, 1, 8).to(gpu), torch.randn(2, 1, 8).to(gpu)
    expected = q.clone(), k.clone()
    rotary(q, k, torch.tensor([-(1 << 40), 1 << 40]).to(gpu), table)
    rotary(*expected, torch.tensor([0, MAX_POSITION - 1]).to(gpu), table)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
