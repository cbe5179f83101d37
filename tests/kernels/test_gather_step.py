"""Inputs of a step, gathered from slots by gather_step, and by gather_tokens within."""

from __future__ import annotations

import pytest
import torch
from support.kernels.slots import (
    BLOCK_SIZE,
    BLOCKS,
    SLOTS,
    K,
    Step,
    copied,
    make_state,
    make_step,
)
from surestep_kernels import KernelSet
from surestep_kernels.slot_state import SlotState
from torch import Tensor


def gathered(kernels: KernelSet, state: SlotState, step: Step) -> tuple[Tensor, ...]:
    """What gather_step leaves."""
    state, error = copied(state), torch.zeros(1, dtype=torch.int32)
    inputs = kernels.step.gather_step(*step, state, error, BLOCK_SIZE, BLOCKS)
    return (*inputs, *state, error)


def test_gathers_what_the_reference_gathers(column: KernelSet, reference: KernelSet) -> None:
    state, step = make_state(), make_step()
    state.folded[0] = state.committed[0] - 2
    step.rows.snapshot_len[1] = state.committed[0] + 1  # within the row
    expected = gathered(reference, state, step)
    assert expected[-1].item() == 0
    assert expected[4].tolist() == [7, 5, 1, 1 + K, 2, 0]  # valid
    assert expected[7].tolist() == [0, 3, 0, 0, 0, 0]  # snapshot_after
    for actual, wanted in zip(gathered(column, state, step), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("wrong", ["slot", "block", "length"])
def test_what_does_not_exist_is_told_and_not_touched(kernels: KernelSet, wrong: str) -> None:
    state, step = make_state(), make_step()
    if wrong == "slot":
        step.rows.slot[3] = 1 << 30
    if wrong == "block":
        state.block_tables[1, 2] = BLOCKS
    if wrong == "length":
        state.committed[5] = state.known[5] = -5
    inputs = gathered(kernels, state, step)
    assert inputs[-1].item() == 1
    assert 0 <= int(inputs[2].min()) <= int(inputs[2].max()) < BLOCKS * BLOCK_SIZE
    assert 0 <= int(inputs[5].min()) <= int(inputs[5].max()) <= SLOTS
