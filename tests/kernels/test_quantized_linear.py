from __future__ import annotations

import pytest
import torch
from support.kernels.cases import (
    DTYPES,
    FORMATS,
    OF_15_BITS,
    assert_close,
    exact_weight,
    make_quantized,
    of_words,
)
from surestep_kernels import KernelSet, QuantizedWeight
from surestep_kernels.linear import WeightFormat

IN_C = [(1, 8), (7, 5), (33, 200), (64, 64), (100, 72), (300, 1536)]  # N, K
IN_TRITON = [(7, 8, 8), (70, 100, 24), (64, 128, 128), (130, 320, 128)]  # and the group
ROWS_IN_C = (1, 2, 3, 4, 6, 7, 12, 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("kernels", "columns", "depth", "group_size", "row_counts"),
    [
        *(
            (name, *shape, group, ROWS_IN_C)
            for name in ("c", "reference")
            for shape in IN_C
            for group in (8, 64, 128)
        ),
        *(("triton", *shape, (1, 19)) for shape in IN_TRITON),
    ],
    indirect=["kernels"],
)
@pytest.mark.rotates(1)
def test_equals_the_exact_product(
    kernels: KernelSet,
    format_: WeightFormat,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    group_size: int,
    row_counts: tuple[int, ...],
) -> None:
    weight, bias = make_quantized(format_, columns, depth, group_size), torch.randn(columns)
    in_digits = format_ is WeightFormat.INT4 and dtype is torch.bfloat16
    in_digits |= of_words(kernels, format_, dtype)
    packed = kernels.pack_quantized(weight, bias)
    for rows in row_counts:
        x = torch.randn(rows, depth).to(dtype)
        expected = (x.double() @ exact_weight(weight).T + bias.double()).float()
        made = kernels.linear(x, packed, torch.float32)
        assert_close(made, expected, ratio=OF_15_BITS if in_digits else None)
        assert_close(kernels.linear(x, packed), expected.to(dtype))


@pytest.mark.parametrize("format_", FORMATS)
def test_no_rows_and_no_bias(column: KernelSet, format_: WeightFormat) -> None:
    packed = column.pack_quantized(make_quantized(format_, 5, 8, 8))
    assert column.linear(torch.empty(0, 8), packed).shape == (0, 5)
    assert column.linear(torch.randn(2, 8), packed).shape == (2, 5)


def test_every_fp8_number_is_decoded_exactly(native: KernelSet) -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    weight = QuantizedWeight(codes[:, None].contiguous(), torch.ones(len(codes), 1), None, 128)
    for rows in (1, 40):
        out = native.linear(torch.ones(rows, 1), native.pack_quantized(weight))
        assert torch.equal(out, codes.float().expand(rows, -1))


def test_every_int4_number_is_decoded_exactly(native: KernelSet) -> None:
    codes, zeros = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8).T
    weight = QuantizedWeight(
        codes[:, None].contiguous(), torch.full((256, 1), 0.5), zeros[:, None].contiguous(), 128
    )
    for rows in (1, 40):
        out = native.linear(torch.ones(rows, 1), native.pack_quantized(weight))
        assert torch.equal(out, ((codes.float() - zeros.float()) / 2).expand(rows, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), [(7, 8), (100, 77), (960, 576), (576, 1536)])
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, format_: WeightFormat, columns: int, depth: int, dtype: torch.dtype
) -> None:
    weight = native.pack_quantized(
        make_quantized(format_, columns, depth, 128), torch.randn(columns)
    )
    x = torch.randn(400, depth).to(dtype)  # more rows than one cache block takes
    native.set_num_threads(2)
    together = native.linear(x, weight)
    for rows in [*range(1, 20), *torch.randint(20, 300, (10,)).tolist()]:
        native.set_num_threads(1 + rows % 3)
        chosen = torch.randperm(400)[:rows]
        assert torch.equal(native.linear(x[chosen], weight), together[chosen])


@pytest.mark.parametrize("format_", FORMATS)
def test_a_nan_stays_in_its_row(column: KernelSet, format_: WeightFormat) -> None:
    x = torch.randn(5, 64)
    x[2, 63] = torch.nan
    out = column.linear(x, column.pack_quantized(make_quantized(format_, 50, 64, 64)))
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(("format_", "bytes_each"), [("FP8", 1 + 4 / 128), ("INT4", 0.5 + 4 / 128)])
def test_a_packed_weight_is_small(native: KernelSet, format_: str, bytes_each: float) -> None:
    weight = make_quantized(WeightFormat[format_], 320, 1024, 128)
    packed = native.pack_quantized(weight)
    assert packed.data.nbytes == weight.nbytes == int(320 * 1024 * bytes_each)
    assert native.linear(torch.empty(0, 1024), packed).shape == (0, 320)
