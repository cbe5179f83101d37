"""Affine weights, whose groups have a scale and a min: the products, and what joins weights."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, make_affine
from surestep_kernels import KernelSet, QuantizedWeight
from surestep_kernels.ops.linear import WeightFormat
from surestep_kernels.ops.quantized import concatenate
from torch import Tensor

FORMATS = [format_ for format_ in WeightFormat if format_.name.startswith("AFFINE")]
SHAPES = [(1, 32), (7, 64), (33, 200), (100, 77), (300, 1536)]  # N, K


def exact(weight: QuantizedWeight) -> Tensor:
    """The weight in fp64, from its definition, element by element of every group."""
    assert weight.mins is not None
    of = torch.arange(weight.codes.shape[1]) // weight.group_size
    return weight.codes.double() * weight.scales[:, of].double() + weight.mins[:, of].double()


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_equals_the_exact_product(
    native: KernelSet,
    reference: KernelSet,
    format_: WeightFormat,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    group_size: int,
) -> None:
    weight, bias = make_affine(format_, columns, depth, group_size), torch.randn(columns)
    for rows in (1, 2, 3, 4, 6, 7, 12, 50):
        x = torch.randn(rows, depth).to(dtype)
        expected = x.double() @ exact(weight).T + bias.double()
        for kernels in (native, reference):
            packed = kernels.pack_quantized(weight, bias)
            assert packed.format is format_
            assert_close(kernels.linear(x, packed, torch.float32), expected.float())
