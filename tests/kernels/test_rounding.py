"""Weights rounded to 8 or 4 bits."""

from __future__ import annotations

import pytest
import torch
from surestep_kernels.ops.rounding import GROUP, rounded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96, 576, 40, 8])
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
