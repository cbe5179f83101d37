from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, FORMATS, assert_close, make_quantized
from surestep_kernels import KernelSet
from surestep_kernels.gpu import linear as ops
from surestep_kernels.linear import WeightFormat


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("columns", "depth", "group_size"), [(7, 8, 8), (70, 100, 24), (64, 128, 128), (130, 320, 128)]
)
def test_equals_the_reference(
    reference: KernelSet,
    format_: WeightFormat,
    columns: int,
    depth: int,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    weight = make_quantized(format_, columns, depth, group_size)
    for rows, bias in ((1, None), (19, torch.randn(columns).to(dtype))):
        x = torch.randn(rows, depth).to(dtype)
        packed = ops.pack_quantized(weight, bias)
        expected = reference.linear(x, reference.pack_quantized(weight, bias), torch.float32)
        assert_close(ops.linear(x, packed, torch.float32), expected)
        assert_close(ops.linear(x, packed), expected.to(dtype))


def test_plain_weights_and_no_rows(reference: KernelSet) -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    plain = reference.pack_linear(weight)
    assert torch.equal(ops.linear(x, plain), reference.linear(x, plain))
    packed = ops.pack_quantized(make_quantized(WeightFormat.FP8, 5, 8, 8))
    assert ops.linear(x[:0], packed).shape == (0, 5)


@pytest.mark.parametrize(("format_", "bytes_each"), [("FP8", 1.0), ("INT4", 0.5)])
def test_codes_stay_packed(format_: str, bytes_each: float) -> None:
    packed = ops.pack_quantized(make_quantized(WeightFormat[format_], 64, 256, 128))
    assert packed.data.nbytes == 64 * 256 * bytes_each
