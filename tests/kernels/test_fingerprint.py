from __future__ import annotations

import pytest
import torch
from support.kernels.slots import K, i32, make_step, random_rows
from surestep_kernels import KernelSet


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [0, 5])
def test_the_fingerprint_is_of_all_bits_but_those_of_padding(
    column: KernelSet, reference: KernelSet, dtype: torch.dtype, prompt: int
) -> None:
    step, valid = make_step(), i32(7, 5, 1, 1 + K, 2, 0)
    count = len(step.rows.position_row)
    hidden = torch.randn(count + prompt, 1500).to(dtype)
    hidden[5, 7] = torch.nan
    expected = reference.step.fingerprint(hidden, step.rows, valid)
    assert torch.equal(column.step.fingerprint(hidden, step.rows, valid), expected)
    hidden[count - 1] = 7  # padding
    assert torch.equal(column.step.fingerprint(hidden, step.rows, valid), expected)
    hidden[0, 1499] += 1
    assert not torch.equal(column.step.fingerprint(hidden, step.rows, valid), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 577])
def test_fingerprints_at_all_widths(
    column: KernelSet, reference: KernelSet, width: int, dtype: torch.dtype
) -> None:
    rows, counts = random_rows(9)
    hidden = torch.randn(len(rows.position_row) + 4, width).to(dtype)
    expected = reference.step.fingerprint(hidden, rows, counts)
    assert torch.equal(column.step.fingerprint(hidden, rows, counts), expected)
    if column.step.synchronous:  # a slice, which a GPU is not given
        sliced = torch.cat((hidden, hidden), dim=1)[:, :width]
        assert torch.equal(column.step.fingerprint(sliced, rows, counts), expected)
