from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from support.kernels.recurrent_cases import TAPS, Layer, Row, Sizes, make_sequence, mixed_batches
from surestep_kernels import KernelSet
from surestep_kernels.causal_conv import triton as ops
from surestep_kernels.recurrent_rows import ConvState, RecurrentRows

SIZES = Sizes(k_heads=1, v_heads=1, k_dim=16, v_dim=117)  # a few channels more than a program has
LENGTH = 60


@pytest.fixture
def kernels(reference: KernelSet) -> KernelSet:
    return replace(reference, causal_conv=ops.causal_conv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(
    gpu: str, reference: KernelSet, kernels: KernelSet, dtype: torch.dtype
) -> None:
    sequences = {slot: make_sequence(SIZES, LENGTH, slot, dtype) for slot in range(3)}
    expected = Layer(reference, SIZES, 4, dtype)
    layer = Layer(kernels, SIZES, 4, dtype, gpu)
    for rows in mixed_batches():
        wanted = torch.cat(expected.convolve(rows, sequences))
        assert_close(torch.cat(layer.convolve(rows, sequences)), wanted)
        for actual, there in zip(layer.conv, expected.conv, strict=True):
            torch.testing.assert_close(actual.cpu(), there, rtol=0, atol=0, equal_nan=True)


def test_a_row_is_the_same_alone_and_in_company(gpu: str, kernels: KernelSet) -> None:
    sequences = {slot: make_sequence(SIZES, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    together = Layer(kernels, SIZES, 3, torch.bfloat16, gpu)
    alone = Layer(kernels, SIZES, 3, torch.bfloat16, gpu)
    for rows in mixed_batches():
        company = together.convolve(rows, sequences)
        assert all(
            torch.equal(out, alone.convolve([row], sequences)[0])
            for row, out in zip(rows, company, strict=True)
        )


def test_a_slice_of_a_projection(gpu: str, reference: KernelSet) -> None:
    projection, weight = torch.randn(20, 50), torch.randn(TAPS, 30)
    rows = _rows([0], [20])
    wanted = reference.causal_conv(projection[:, 3:33], weight, _state(30, "cpu"), rows)
    moved = RecurrentRows._make([*(column.to(gpu) for column in rows[:-1]), rows.max_tokens])
    x = projection.to(gpu)[:, 3:33]
    assert_close(ops.causal_conv(x, weight.to(gpu), _state(30, gpu), moved).cpu(), wanted)


def test_padding_and_unknown_slots_touch_nothing_else(gpu: str) -> None:
    """Rows without tokens, several of them on one slot, and slots that there are not."""
    rows = _rows([1, 3, 3, 4, -1], [2, 0, 0, 1, 1])
    moved = RecurrentRows._make([*(column.to(gpu) for column in rows[:-1]), rows.max_tokens])
    conv = _state(30, gpu)
    out = ops.causal_conv(torch.randn(4, 30).to(gpu), torch.randn(TAPS, 30).to(gpu), conv, moved)
    assert out[:2].isfinite().all()
    assert conv.inputs[1, : TAPS - 1].isfinite().all()
    assert conv.inputs[[0, 2]].isnan().all()
    assert conv.snapshots.isnan().all()


def _state(channels: int, device: str) -> ConvState:
    shapes = (4, TAPS - 1 + 4, channels), (1, TAPS - 1, channels)
    return ConvState(*(torch.full(shape, torch.nan, device=device) for shape in shapes))


def _rows(slots: list[int], counts: list[int]) -> RecurrentRows:
    zeros = torch.zeros(len(slots), dtype=torch.int32)
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    return RecurrentRows(
        torch.tensor(slots), bounds, zeros, zeros, zeros, zeros, zeros, zeros, max(counts)
    )


def test_a_row_of_one_token_folds_every_count(gpu: str, kernels: KernelSet) -> None:
    sequences = {0: make_sequence(SIZES, LENGTH, 0, torch.float32)}
    for accepted in range(SIZES.records + 1):
        layer = Layer(kernels, SIZES, 1, torch.float32, gpu)
        layer.convolve([Row(0, 0, 9, window=False, pending=0)], sequences)
        layer.convolve([Row(0, 9, SIZES.records, window=True, pending=0)], sequences)
        layer.convolve([Row(0, 9 + accepted, 1, window=True, pending=accepted)], sequences)
        x = sequences[0].x[9 + accepted - (TAPS - 1) : 10 + accepted]
        assert torch.equal(layer.conv.inputs[0, :TAPS].cpu(), x)
