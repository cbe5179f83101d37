from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from support.kernels.recurrent_cases import TAPS, Layer, Row, Sizes, make_sequence, mixed_batches
from surestep_kernels import KernelSet
from surestep_kernels.recurrent_rows import ConvState, RecurrentRows

SIZES = Sizes(k_heads=1, v_heads=1, k_dim=16, v_dim=120)  # a few channels more than a program has
LENGTH = 60


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(column: KernelSet, reference: KernelSet, dtype: torch.dtype) -> None:
    sequences = {slot: make_sequence(SIZES, LENGTH, slot, dtype) for slot in range(3)}
    expected = Layer(reference, SIZES, 4, dtype)
    layer = Layer(column, SIZES, 4, dtype)
    for rows in mixed_batches():
        wanted = torch.cat(expected.convolve(rows, sequences))
        assert_close(torch.cat(layer.convolve(rows, sequences)), wanted)
        for actual, there in zip(layer.conv, expected.conv, strict=True):
            torch.testing.assert_close(actual, there, rtol=0, atol=0, equal_nan=True)


def test_a_row_is_the_same_alone_and_in_company(kernels: KernelSet) -> None:
    sequences = {slot: make_sequence(SIZES, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    together = Layer(kernels, SIZES, 3, torch.bfloat16)
    alone = Layer(kernels, SIZES, 3, torch.bfloat16)
    for rows in mixed_batches():
        company = together.convolve(rows, sequences)
        assert all(
            torch.equal(out, alone.convolve([row], sequences)[0])
            for row, out in zip(rows, company, strict=True)
        )


def test_a_slice_of_a_projection(column: KernelSet, reference: KernelSet) -> None:
    x, weight = torch.randn(20, 56)[:, 3:35], torch.randn(TAPS, 32)
    rows = _rows([0], [20])
    wanted = reference.causal_conv(x, weight, _state(32), rows)
    assert_close(column.causal_conv(x, weight, _state(32), rows), wanted)


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_padding_and_unknown_slots_touch_nothing_else(column: KernelSet) -> None:
    """Rows without tokens, several of them on one slot, and slots that there are not."""
    rows, conv = _rows([1, 3, 3, 4, -1], [2, 0, 0, 1, 1]), _state(30)
    out = column.causal_conv(torch.randn(4, 30), torch.randn(TAPS, 30), conv, rows)
    assert out[:2].isfinite().all()
    assert conv.inputs[1, : TAPS - 1].isfinite().all()
    assert conv.inputs[[0, 2]].isnan().all()
    assert conv.snapshots.isnan().all()


def _state(channels: int) -> ConvState:
    shapes = (4, TAPS - 1 + 4, channels), (1, TAPS - 1, channels)
    return ConvState(*(torch.full(shape, torch.nan) for shape in shapes))


def _rows(slots: list[int], counts: list[int]) -> RecurrentRows:
    zeros = torch.zeros(len(slots), dtype=torch.int32)
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    return RecurrentRows(
        torch.tensor(slots), bounds, zeros, zeros, zeros, zeros, zeros, zeros, max(counts)
    )


def test_a_row_of_one_token_folds_every_count(kernels: KernelSet) -> None:
    sequences = {0: make_sequence(SIZES, LENGTH, 0, torch.float32)}
    for accepted in range(SIZES.records + 1):
        layer = Layer(kernels, SIZES, 1, torch.float32)
        layer.convolve([Row(0, 0, 9, window=False, pending=0)], sequences)
        layer.convolve([Row(0, 9, SIZES.records, window=True, pending=0)], sequences)
        layer.convolve([Row(0, 9 + accepted, 1, window=True, pending=accepted)], sequences)
        x = sequences[0].x[9 + accepted - (TAPS - 1) : 10 + accepted]
        assert torch.equal(layer.conv.inputs[0, :TAPS], x)
