from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DTYPES, FORMATS, assert_close, make_quantized
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.gpu import linear as ops
from surestep_kernels.linear import WeightFormat
from surestep_kernels.quantized import QuantizedWeight
from torch import Tensor


def pack(weight: QuantizedWeight, bias: Tensor | None, device: str) -> PackedLinear:
    """A weight that lies on a device, packed there."""
    parts = weight.codes, weight.scales, weight.zeros
    codes, scales, zeros = (None if part is None else part.to(device) for part in parts)
    assert codes is not None
    assert scales is not None
    moved = QuantizedWeight(codes, scales, zeros, weight.group_size)
    return ops.pack_quantized(moved, None if bias is None else bias.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("columns", "depth", "group_size"), [(7, 8, 8), (70, 100, 24), (64, 128, 128), (130, 320, 128)]
)
def test_equals_the_reference(
    gpu: str,
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
        packed = pack(weight, bias, gpu)
        expected = reference.linear(x, reference.pack_quantized(weight, bias), torch.float32)
        assert_close(ops.linear(x.to(gpu), packed, torch.float32).cpu(), expected)
        assert_close(ops.linear(x.to(gpu), packed).cpu(), expected.to(dtype))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("rows", [17, 40, 260])
def test_all_tiles_equal_the_reference(
    gpu: str, reference: KernelSet, format_: WeightFormat, rows: int
) -> None:
    """Five splits; the last group holds one input."""
    weight, bias = make_quantized(format_, 70, 145, 16), torch.randn(70)
    x = torch.randn(rows, 145).bfloat16()
    packed = pack(weight, bias, gpu)
    assert ops.groups_per_split(packed) == 2
    expected = reference.linear(x, reference.pack_quantized(weight, bias), torch.float32)
    assert_close(ops.linear(x.to(gpu), packed, torch.float32).cpu(), expected)


@pytest.mark.parametrize("format_", FORMATS)
def test_splits_are_added_in_one_order(gpu: str, format_: WeightFormat) -> None:
    """Whether they are programs of their own, or loops of one, changes no bit."""
    packed = pack(make_quantized(format_, 40, 400, 32), torch.randn(40), gpu)
    x = torch.randn(5, 400).bfloat16().to(gpu)
    per_split = ops.groups_per_split(packed)
    assert 1 < per_split < 13
    together = torch.empty(5, 40, device=gpu)
    tiles = ops._FEW._replace(apart=False)
    ops._launch(together, packed.bias, tiles, x=x, packed=packed, per_split=per_split)
    assert torch.equal(together, ops.linear(x, packed, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(gpu: str, dtype: torch.dtype) -> None:
    if gpu == "cpu":
        pytest.skip("the interpreter's products are NumPy's, which look at the other rows")
    packed = pack(make_quantized(WeightFormat.FP8, 70, 320, 64), None, gpu)
    x = torch.randn(16, 320).to(dtype).to(gpu)
    alone = torch.cat([ops.linear(row, packed) for row in x.split(1)])
    assert torch.equal(ops.linear(x, packed), alone)


def test_no_rows(gpu: str) -> None:
    packed = pack(make_quantized(WeightFormat.FP8, 5, 8, 8), None, gpu)
    assert ops.linear(torch.empty(0, 8, device=gpu), packed).shape == (0, 5)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(out_ptr: Any, codes_ptr: Any, NATIVE: tl.constexpr) -> None:
    at = tl.arange(0, 256)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, ops._decode_fp8(tl.load(codes_ptr + at), dtype, NATIVE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_decodes_every_fp8_number(gpu: str, native: bool, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256, dtype=dtype, device=gpu)
    _decode_kernel[(1,)](out, codes.to(gpu), NATIVE=native)
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    is_number = ~expected.isnan()
    assert torch.equal(out.cpu()[is_number], expected[is_number])


@pytest.mark.parametrize(("format_", "bytes_each"), [("FP8", 1.0), ("INT4", 0.5)])
def test_codes_stay_packed(format_: str, bytes_each: float) -> None:
    packed = ops.pack_quantized(make_quantized(WeightFormat[format_], 64, 256, 128))
    assert packed.data.nbytes == 64 * 256 * bytes_each
