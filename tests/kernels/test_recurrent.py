"""The state of a gated delta layer advances by committed tokens only, bit for bit as if alone."""

from __future__ import annotations

import random

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from support.kernels.recurrent_cases import TAPS, Layer, Row, Sequence, Sizes, make_sequence
from surestep_kernels import KernelSet
from torch import Tensor

SIZES = Sizes()
LENGTH = 40


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    chosen: KernelSet = request.getfixturevalue(request.param)
    return chosen


def one_by_one(kernels: KernelSet, sequence: Sequence, length: int) -> tuple[Tensor, Layer]:
    """Outputs and state of a prompt that is computed token by token."""
    layer = Layer(kernels, SIZES, 1, sequence.x.dtype)
    rows = [Row(0, t, 1, window=False, pending=0) for t in range(length)]
    return torch.cat([layer.run([row], {0: sequence})[0] for row in rows]), layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_equals_the_reference(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype
) -> None:
    sequence = make_sequence(SIZES, LENGTH, 1, dtype)
    outputs, states = [], []
    for kernels in (native, reference):
        layer = Layer(kernels, SIZES, 1, dtype)
        rows = [
            Row(0, 0, 30, window=False, pending=0),
            Row(0, 30, 5, window=True, pending=0),
            Row(0, 33, 4, window=True, pending=3),
        ]
        outputs.append(torch.cat([layer.run([row], {0: sequence})[0] for row in rows]))
        states.append(layer.delta.state)
    assert_close(outputs[0], outputs[1])
    assert_close(states[0], states[1])


@pytest.mark.parametrize("width", range(1, SIZES.records + 1))
def test_every_accepted_count_folds_to_the_sequential_state(kernels: KernelSet, width: int) -> None:
    sequence = make_sequence(SIZES, LENGTH, 2, torch.float32)
    for accepted in range(width + 1):
        layer = Layer(kernels, SIZES, 1, torch.float32)
        layer.run([Row(0, 0, 9, window=False, pending=0)], {0: sequence})
        layer.run([Row(0, 9, width, window=True, pending=0)], {0: sequence})
        (out,) = layer.run([Row(0, 9 + accepted, 1, window=True, pending=accepted)], {0: sequence})
        expected, alone = one_by_one(kernels, sequence, 9 + accepted)
        assert torch.equal(layer.delta.state, alone.delta.state)
        assert torch.equal(layer.conv.inputs[0, : TAPS - 1], alone.conv.inputs[0, : TAPS - 1])
        expected, _ = one_by_one(kernels, sequence, 10 + accepted)
        assert torch.equal(out, expected[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_ragged_lifetimes_equal_one_token_at_a_time(
    kernels: KernelSet, seed: int, dtype: torch.dtype
) -> None:
    """Slots in shuffled order: chunks of prompts, windows of every width and accepted count."""
    rng = random.Random(seed)
    count = 5
    sequences = {s: make_sequence(SIZES, LENGTH, 10 * seed + s, dtype) for s in range(count)}
    expected = {s: one_by_one(kernels, sequences[s], LENGTH)[0] for s in range(count)}
    prompt = {s: rng.randrange(1, 20) for s in range(count)}
    done, pending = dict.fromkeys(range(count), 0), dict.fromkeys(range(count), 0)
    layer = Layer(kernels, SIZES, count, dtype)
    while any(done[s] < LENGTH for s in done):
        rows = []
        for slot in rng.sample(range(count), k=count):
            window = done[slot] >= prompt[slot]
            limit = LENGTH - done[slot] if window else prompt[slot] - done[slot]
            n = min(limit, rng.randrange(1, SIZES.records + 1))
            if n > 0:
                rows.append(Row(slot, done[slot], n, window, pending[slot]))
        for row, out in zip(rows, layer.run(rows, sequences), strict=True):
            assert torch.equal(out, expected[row.slot][row.first : row.first + row.n]), row
            accepted = rng.randrange(row.n + 1) if row.window else row.n
            done[row.slot] += accepted
            pending[row.slot] = accepted if row.window else 0


def test_threads_do_not_show(native: KernelSet) -> None:
    outputs = []
    for threads in (1, 2):
        native.set_num_threads(threads)
        sequences = {s: make_sequence(SIZES, LENGTH, s, torch.float32) for s in range(7)}
        layer = Layer(native, SIZES, 7, torch.float32)
        rows = [Row(s, 0, 5 + s, window=False, pending=0) for s in range(7)]
        outputs.append(torch.cat(layer.run(rows, sequences)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_snapshot_is_the_state_at_exactly_its_length(kernels: KernelSet, at: int) -> None:
    """Taken while folding (up to 4 tokens) and inside a prompt's chunk (behind them)."""
    sequence = make_sequence(SIZES, LENGTH, 3, torch.float32)
    layer = Layer(kernels, SIZES, 1, torch.float32)
    layer.run([Row(0, 0, 6, window=False, pending=0)], {0: sequence})
    layer.run([Row(0, 6, 6, window=True, pending=0)], {0: sequence})
    layer.run([Row(0, 10, 7, False, pending=4, snapshot_after=at, snapshot_line=2)], {0: sequence})
    _, alone = one_by_one(kernels, sequence, 6 + at)
    assert torch.equal(layer.delta.snapshots[2], alone.delta.state[0])
    assert torch.equal(layer.conv.snapshots[2], alone.conv.inputs[0, : TAPS - 1])
    assert layer.delta.snapshots[[0, 1, 3]].isnan().all()


def test_a_window_takes_no_snapshot_of_its_drafts(kernels: KernelSet) -> None:
    sequence = make_sequence(SIZES, LENGTH, 3, torch.float32)
    layer = Layer(kernels, SIZES, 1, torch.float32)
    layer.run([Row(0, 0, 6, window=False, pending=0)], {0: sequence})
    layer.run([Row(0, 6, 6, True, pending=0, snapshot_after=3)], {0: sequence})
    assert layer.delta.snapshots.isnan().all()
    assert layer.conv.snapshots.isnan().all()


def test_other_slots_are_not_touched(kernels: KernelSet) -> None:
    sequences = {s: make_sequence(SIZES, LENGTH, s, torch.float32) for s in range(3)}
    layer = Layer(kernels, SIZES, 3, torch.float32)
    layer.run([Row(1, 0, 6, window=False, pending=0)], sequences)
    layer.run([Row(1, 6, 3, window=True, pending=0)], sequences)
    for tensor in (*layer.delta[:1], *layer.delta[2:], layer.conv.inputs):
        assert tensor[[0, 2]].isnan().all()
        assert not tensor[1].isnan().all()
