"""Weights rounded to codes of 8 or 4 bits, and to FP8."""

from __future__ import annotations

import pytest
import torch
from surestep_kernels.linear import FP8, GROUP, INT4, INT8, ROUNDINGS, concatenate, rounded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96, 576, 40, 8, 77, 1])
@pytest.mark.parametrize("size", [1.0, 1e-4, 3e4, 1e6])
def test_no_element_is_further_off_than_half_a_step(bits: int, columns: int, size: float) -> None:
    weight = torch.randn(7, columns) * size
    weight[0] = 0.0
    weight[1] = size
    weight[2, ::GROUP] = 8 * size
    made = rounded(weight, bits)
    steps = made.scales.repeat_interleave(GROUP, dim=1)[:, :columns]
    lost = (made.dequantize() - weight).abs()
    # Scales and mins are rounded to 11 bits, or are as small as float16 goes.
    bound = steps / 2 + (weight.abs() + steps * (1 << bits)) * 2**-11 + 2**-25 * (1 << bits)
    assert (lost <= bound).all(), (lost - bound).max()
    assert made.scales[:, 0].isfinite().all()
    assert torch.equal(made.dequantize()[1], torch.tensor(size).half().float().expand(columns)) or (
        size > 6e4
    )


def test_what_has_so_few_values_is_kept() -> None:
    weight = torch.randint(0, 16, (5, 64)).float() * 0.25 - 1.0
    weight[:, 0::32], weight[:, 1::32] = -1.0, 2.75
    assert torch.equal(rounded(weight, 4).dequantize(), weight)


@pytest.mark.parametrize("columns", [128, 576, 40, 77, 1])
@pytest.mark.parametrize("size", [1.0, 1e-4, 3e4, 1e6])
def test_fp8_keeps_four_bits_of_a_number(columns: int, size: float) -> None:
    weight = torch.randn(7, columns) * size
    weight[0] = 0.0
    weight[1] = size
    weight[2, ::7] = 8 * size
    made = FP8(weight)
    steps = made.scales.repeat_interleave(FP8.group, dim=1)[:, :columns]
    lost = (made.dequantize() - weight).abs()
    # Half of the last of four bits, or of the step between the numbers that have fewer.
    assert (lost <= torch.maximum(weight.abs() * 2**-4, steps * 2**-10) * (1 + 1e-5)).all()
    assert torch.equal(made.dequantize()[0], weight[0])
    assert torch.allclose(made.dequantize()[1], weight[1], rtol=1e-6)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_number_that_is_none_is_not_rounded(name: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = torch.randn(3, 77)
        weight[1, 70] = bad
        with pytest.raises(ValueError, match="NaN, infinite or too large"):
            ROUNDINGS[name](weight)
        with pytest.raises(ValueError, match="NaN, infinite or too large"):
            ROUNDINGS[name](weight.bfloat16())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_row_is_rounded_by_itself_whatever_is_beside_it(name: str) -> None:
    """One row is too large for float16, and rows are rounded many at once."""
    weight = torch.randn(600, 1000)
    weight[5] *= 1e5
    whole = ROUNDINGS[name](weight)
    apart = [ROUNDINGS[name](rows) for rows in weight.split([5, 1, 594])]
    assert torch.equal(whole.dequantize(), concatenate(apart).dequantize())
    assert torch.equal(whole.dequantize(), ROUNDINGS[name](weight.T.contiguous().T).dequantize())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_some_inputs_of_a_weight(name: str) -> None:
    whole = ROUNDINGS[name](torch.randn(5, 333))
    for first, count in [(0, 333), (0, 100), (128, 205), (256, 8)]:
        part = whole.inputs(first, count).dequantize()
        assert torch.equal(part, whole.dequantize()[:, first : first + count])


def test_what_shall_keep_more_bits_gets_them() -> None:
    assert [rounding.keeping(4) for rounding in (INT4, INT8, FP8)] == [INT4, INT8, FP8]
    assert [rounding.keeping(8) for rounding in (INT4, INT8, FP8)] == [INT8, INT8, None]
    assert [rounding.keeping(32) for rounding in (INT4, INT8, FP8)] == [None] * 3


@pytest.mark.parametrize("name", ROUNDINGS)
def test_the_size_that_is_estimated(name: str) -> None:
    made = ROUNDINGS[name](torch.randn(64, 1024))
    assert made.nbytes == ROUNDINGS[name].nbytes(64 * 1024)
