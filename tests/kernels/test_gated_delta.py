"""The state of a gated delta layer advances by committed tokens only, bit for bit as if alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from support.kernels.recurrent_cases import (
    TAPS,
    Layer,
    Row,
    Sequence,
    Sizes,
    make_sequence,
    mixed_batches,
)
from surestep_kernels import KernelSet
from surestep_kernels.gated_delta.chunks import CHUNK
from torch import Tensor

SMALL = Sizes(k_heads=1, v_heads=1, k_dim=12, v_dim=9, records=4)  # for the interpreter
SHARED_KEYS = Sizes(k_heads=1, v_heads=2, k_dim=16, v_dim=40)  # 40: more than a program has
OWN_KEYS = Sizes(k_heads=2, v_heads=2, k_dim=12, v_dim=9)
LENGTH = 60


def sizes_for(kernels: KernelSet) -> Sizes:
    return SMALL if kernels.delta_chunk > 1 else Sizes()


def equal_where_written(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_close(actual.nan_to_num(), expected.nan_to_num())


def near(actual: Tensor, expected: Tensor) -> None:
    """As near as chunks are: in TF32 on a GPU, in fp32 in the interpreter; and a bit of bfloat16."""
    assert torch.equal(actual.isnan(), expected.isnan())
    wanted = expected.float().nan_to_num()
    ratio = 1e-4 if expected.dtype is torch.float32 and not torch.cuda.is_available() else 3e-2
    bit = 0.0 if expected.dtype is torch.float32 else 2.0**-7
    allowed = ratio * wanted.square().mean().sqrt() + bit * wanted.abs()
    error = (actual.float().nan_to_num() - wanted).abs()
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.parametrize(
    ("column", "sizes", "dtype"),
    [
        ("c", Sizes(), torch.float32),
        ("c", Sizes(), torch.bfloat16),
        ("c", SHARED_KEYS, torch.float32),
        ("triton", SHARED_KEYS, torch.float32),
        ("triton", OWN_KEYS, torch.bfloat16),
    ],
    indirect=["column"],
)
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, sizes: Sizes, dtype: torch.dtype
) -> None:
    sequences = {slot: make_sequence(sizes, LENGTH, slot, dtype) for slot in range(3)}
    expected = Layer(reference, sizes, 4, dtype)
    layer = Layer(column, sizes, 4, dtype)
    for rows in mixed_batches():
        qkv = torch.cat(expected.convolve(rows, sequences))
        wanted = torch.cat(expected.apply_delta_rule(qkv, rows, sequences))
        assert_close(torch.cat(layer.apply_delta_rule(qkv, rows, sequences)), wanted)
        for actual, there in zip(layer.delta, expected.delta, strict=True):
            equal_where_written(actual, there)


def test_a_row_is_the_same_alone_and_in_company(column: KernelSet) -> None:
    sizes = replace(sizes_for(column), records=6)
    sequences = {slot: make_sequence(sizes, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    together = Layer(column, sizes, 3, torch.bfloat16)
    alone = Layer(column, sizes, 3, torch.bfloat16)
    for rows in mixed_batches():
        for row, out in zip(rows, together.run(rows, sequences), strict=True):
            assert torch.equal(out, alone.run([row], sequences)[0])


class OneByOne:
    """A prompt that is computed token by token."""

    def __init__(self, kernels: KernelSet, sizes: Sizes, sequence: Sequence, length: int) -> None:
        layer = Layer(kernels, sizes, 1, sequence.x.dtype)
        outputs = list[Tensor]()
        self.states = [self.held(layer)]  # after 0, 1, ... tokens
        for t in range(length):
            outputs += layer.run([Row(0, t, 1, window=False, pending=0)], {0: sequence})
            self.states.append(self.held(layer))
        self.outputs = torch.cat(outputs)

    @staticmethod
    def held(layer: Layer) -> tuple[Tensor, Tensor]:
        return layer.delta.state[0].clone(), layer.conv.inputs[0, : TAPS - 1].clone()


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kernels", "width"),
    [*((name, width) for name in ("reference", "c") for width in range(1, 7)), ("triton", 4)],
    indirect=["kernels"],
)
def test_every_accepted_count_folds_to_the_sequential_state(kernels: KernelSet, width: int) -> None:
    """Bit for bit: drafts, a prompt and plain decoding are one computation."""
    sizes, prompt = sizes_for(kernels), 3
    sequence = make_sequence(sizes, LENGTH, 2, torch.float32)
    expected = OneByOne(kernels, sizes, sequence, prompt + width + 1)
    for accepted in range(width + 1):
        layer, done = Layer(kernels, sizes, 1, torch.float32), prompt + accepted
        layer.run([Row(0, 0, prompt, window=False, pending=0)], {0: sequence})
        (window,) = layer.run([Row(0, prompt, width, window=True, pending=0)], {0: sequence})
        (out,) = layer.run([Row(0, done, 1, window=True, pending=accepted)], {0: sequence})
        assert_same(OneByOne.held(layer), expected.states[done])
        assert torch.equal(window, expected.outputs[prompt : prompt + width])
        assert torch.equal(out[0], expected.outputs[done])


@pytest.mark.parametrize("kernels", ["reference", "c"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.rotates(1)
def test_ragged_lifetimes_equal_one_token_at_a_time(
    kernels: KernelSet, seed: int, dtype: torch.dtype
) -> None:
    """Slots in shuffled order: chunks of prompts, windows of every width and accepted count."""
    rng = random.Random(seed)
    sizes, count = Sizes(), 5
    sequences = {s: make_sequence(Sizes(), LENGTH, 10 * seed + s, dtype) for s in range(count)}
    expected = {s: OneByOne(kernels, Sizes(), sequences[s], LENGTH).outputs for s in range(count)}
    prompt = {s: rng.randrange(1, 20) for s in range(count)}
    done, pending = dict.fromkeys(range(count), 0), dict.fromkeys(range(count), 0)
    layer = Layer(kernels, Sizes(), count, dtype)
    while any(done[s] < LENGTH for s in done):
        rows = []
        for slot in rng.sample(range(count), k=count):
            window = done[slot] >= prompt[slot]
            limit = LENGTH - done[slot] if window else prompt[slot] - done[slot]
            n = min(limit, rng.randrange(1, sizes.records + 1))
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
        sequences = {s: make_sequence(Sizes(), LENGTH, s, torch.float32) for s in range(7)}
        layer = Layer(native, Sizes(), 7, torch.float32)
        rows = [Row(s, 0, 5 + s, window=False, pending=0) for s in range(7)]
        outputs.append(torch.cat(layer.run(rows, sequences)))
    assert torch.equal(*outputs)


def test_a_snapshot_is_the_state_at_exactly_its_length(kernels: KernelSet) -> None:
    """Taken while folding (up to 2 tokens) and inside a prompt's chunk (behind them)."""
    sizes = sizes_for(kernels)
    sequence = make_sequence(sizes, LENGTH, 3, torch.float32)
    expected = OneByOne(kernels, sizes, sequence, 9)
    for after in range(1, 6):
        layer = Layer(kernels, sizes, 1, torch.float32)
        layer.run([Row(0, 0, 4, window=False, pending=0)], {0: sequence})
        layer.run([Row(0, 4, 3, window=True, pending=0)], {0: sequence})
        layer.run([Row(0, 6, 3, False, 2, snapshot_after=after, snapshot_line=2)], {0: sequence})
        taken = layer.delta.snapshots[2], layer.conv.snapshots[2]
        assert_same(taken, expected.states[4 + after])
        assert layer.delta.snapshots[[0, 1, 3]].isnan().all()


def test_a_snapshot_may_be_the_state_of_another_slot(kernels: KernelSet) -> None:
    """As a draft model keeps them, without records."""
    sizes = replace(sizes_for(kernels), records=0)
    of = dict.fromkeys((0, 2), make_sequence(sizes, LENGTH, 3, torch.float32))
    expected, layer = OneByOne(kernels, sizes, of[0], 8), Layer(kernels, sizes, 3, torch.float32)
    layer.delta = layer.delta._replace(snapshots=layer.delta.state)
    layer.conv = layer.conv._replace(snapshots=layer.conv.inputs)
    layer.run([Row(0, 0, 5, False, 0, snapshot_after=5, snapshot_line=2)], of)
    for slot in (2, 0):
        for t in (5, 6):
            (out,) = layer.run([Row(slot, t, 1, False, 0)], of)
            assert torch.equal(out[0], expected.outputs[t])


def test_a_window_takes_no_snapshot_of_its_drafts(kernels: KernelSet) -> None:
    sizes = sizes_for(kernels)
    sequence, layer = (
        make_sequence(sizes, LENGTH, 3, torch.float32),
        Layer(kernels, sizes, 1, torch.float32),
    )
    layer.run([Row(0, 0, 3, window=False, pending=0)], {0: sequence})
    layer.run([Row(0, 3, 4, True, pending=0, snapshot_after=3)], {0: sequence})
    assert layer.delta.snapshots.isnan().all()
    assert layer.conv.snapshots.isnan().all()


def test_other_slots_are_not_touched(kernels: KernelSet) -> None:
    sizes = sizes_for(kernels)
    sequences = {s: make_sequence(sizes, LENGTH, s, torch.float32) for s in range(3)}
    layer = Layer(kernels, sizes, 3, torch.float32)
    layer.run([Row(1, 0, 6, window=False, pending=0)], sequences)
    layer.run([Row(1, 6, 3, window=True, pending=0)], sequences)
    for tensor in (*layer.delta[:1], *layer.delta[2:], layer.conv.inputs):
        assert tensor[[0, 2]].isnan().all()
        assert not tensor[1].isnan().all()


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_padding_and_unknown_slots_touch_nothing_else(column: KernelSet) -> None:
    """Rows without tokens on the NULL slot, rows that share it, and slots that there are not."""
    sequences = {slot: make_sequence(SMALL, LENGTH, 1, torch.float32) for slot in (-1, 1, 3, 9)}
    layer = Layer(column, SMALL, 4, torch.float32)
    rows = [Row(1, 0, 2, True, 0), Row(3, 0, 1, True, 0), Row(3, 0, 1, True, 0)]
    outputs = layer.run([*rows, Row(3, 0, 0, True, 0), Row(9, 0, 1, True, 0)], sequences)
    layer.run([Row(-1, 0, 1, False, 0, snapshot_after=1)], sequences)
    assert outputs[0].isfinite().all()
    for tensor in (layer.delta.state, *layer.delta[2:]):
        assert tensor[[0, 2]].isnan().all()
        assert not tensor[1].isnan().all()
    assert layer.delta.snapshots.isnan().all()


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_launches_for_longer_rows_change_no_bit(column: KernelSet) -> None:
    """As captured steps have them, which do not know how long a row will be."""

    def wide(op: Any) -> Any:
        return lambda *inputs: op(*inputs[:-1], inputs[-1]._replace(max_tokens=3 * CHUNK))

    ops_for_more = {name: wide(getattr(column, name)) for name in ("causal_conv", "gated_delta")}
    sizes = replace(SMALL, records=6)
    sequences = {slot: make_sequence(sizes, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    narrow = Layer(column, sizes, 4, torch.bfloat16)
    layer = Layer(replace(column, **ops_for_more), sizes, 4, torch.bfloat16)
    for rows in mixed_batches():
        expected, actual = (torch.cat(each.run(rows, sequences)) for each in (narrow, layer))
        assert torch.equal(actual, expected)
    for one, other in zip((*layer.delta, *layer.conv), (*narrow.delta, *narrow.conv), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


LONG = CHUNK + 7  # a whole chunk, and a tail


@pytest.mark.parametrize("column", ["triton"], indirect=True)
@pytest.mark.parametrize("sizes", [SHARED_KEYS, OWN_KEYS], ids=["shared keys", "own keys"])
def test_long_prompts_equal_the_reference(
    column: KernelSet, reference: KernelSet, sizes: Sizes
) -> None:
    """In chunks, beside rows that are not, with snapshots at the end of chunks and behind them."""
    sequences = {slot: make_sequence(sizes, 3 * LONG, slot, torch.bfloat16) for slot in range(4)}
    two = 2 * CHUNK
    batches = [
        [Row(0, 0, 3, False, 0), Row(1, 0, LONG, False, 0, CHUNK + 2, 0, CHUNK)],
        [Row(0, 3, 4, True, 0), Row(2, 0, two + 1, False, 0, two, 1, two)],
        [Row(3, 0, CHUNK, False, 0, CHUNK, 3, CHUNK), Row(1, LONG, 2, True, 0)],
        [Row(0, 5, LONG, False, 2, 1, 2), Row(3, CHUNK, two, False, 0, two, 3, CHUNK)],
        [Row(3, 3 * CHUNK, 1, True, 0), Row(1, LONG + 1, 3, True, 1), Row(2, two + 1, 1, True, 0)],
    ]
    expected = Layer(reference, sizes, 4, torch.bfloat16)
    layer = Layer(column, sizes, 4, torch.bfloat16)
    for rows in batches:
        qkv = torch.cat(expected.convolve(rows, sequences))
        wanted = torch.cat(expected.apply_delta_rule(qkv, rows, sequences))
        near(torch.cat(layer.apply_delta_rule(qkv, rows, sequences)), wanted)
        for actual, there in zip(layer.delta, expected.delta, strict=True):
            near(actual, there)


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_keys_that_repeat(column: KernelSet, reference: KernelSet) -> None:
    """What a chunk inverts is worst where all keys are one and nothing decays."""
    made = make_sequence(SMALL, LONG, 1, torch.bfloat16)
    gates = torch.cat((torch.full((LONG, 1), 9.0), torch.full((LONG, 1), -9.0)), dim=1).bfloat16()
    sequence = Sequence(made.x[:1].expand(LONG, -1), gates)
    rows = [Row(0, 0, LONG, False, 0, chunked=CHUNK)]
    qkv = sequence.x.contiguous()
    qkv[:, 2 * SMALL.k_dim :] = torch.randn(LONG, SMALL.v_dim)
    wanted = Layer(reference, SMALL, 1, torch.bfloat16).apply_delta_rule(qkv, rows, {0: sequence})
    layer = Layer(column, SMALL, 1, torch.bfloat16)
    near(layer.apply_delta_rule(qkv, rows, {0: sequence})[0], wanted[0])
