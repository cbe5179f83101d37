from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.cases import assert_close
from support.kernels.recurrent_cases import (
    Layer,
    Row,
    Sequence,
    Sizes,
    make_sequence,
    mixed_batches,
)
from surestep_kernels import KernelSet
from surestep_kernels.causal_conv import triton as conv_ops
from surestep_kernels.gated_delta import triton as ops
from surestep_kernels.gated_delta.chunks import CHUNK
from torch import Tensor

SMALL = Sizes(k_heads=1, v_heads=1, k_dim=12, v_dim=9, records=4)
SHARED_KEYS = Sizes(k_heads=1, v_heads=2, k_dim=16, v_dim=40)  # 40: more than a program has
OWN_KEYS = Sizes(k_heads=2, v_heads=2, k_dim=12, v_dim=9)
LENGTH = 60


@pytest.fixture
def kernels(reference: KernelSet) -> KernelSet:
    return replace(reference, causal_conv=conv_ops.causal_conv, gated_delta=ops.gated_delta)


def equal_where_written(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_close(actual.nan_to_num(), expected.nan_to_num())


def near(actual: Tensor, expected: Tensor, gpu: str) -> None:
    """As near as chunks are: in TF32 on a GPU, in fp32 in the interpreter; and a bit of bfloat16."""
    assert torch.equal(actual.isnan(), expected.isnan())
    wanted = expected.float().nan_to_num()
    ratio = 1e-4 if expected.dtype is torch.float32 and gpu == "cpu" else 3e-2
    bit = 0.0 if expected.dtype is torch.float32 else 2.0**-7
    allowed = ratio * wanted.square().mean().sqrt() + bit * wanted.abs()
    error = (actual.float().nan_to_num() - wanted).abs()
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(SHARED_KEYS, torch.float32), (OWN_KEYS, torch.bfloat16)],
    ids=["shared keys, fp32", "own keys, bf16"],
)
def test_equals_the_reference(
    gpu: str, reference: KernelSet, kernels: KernelSet, sizes: Sizes, dtype: torch.dtype
) -> None:
    sequences = {slot: make_sequence(sizes, LENGTH, slot, dtype) for slot in range(3)}
    expected = Layer(reference, sizes, 4, dtype)
    layer = Layer(kernels, sizes, 4, dtype, gpu)
    for rows in mixed_batches():
        qkv = torch.cat(expected.convolve(rows, sequences))
        wanted = torch.cat(expected.apply_delta_rule(qkv, rows, sequences))
        assert_close(torch.cat(layer.apply_delta_rule(qkv, rows, sequences)), wanted)
        for actual, there in zip(layer.delta, expected.delta, strict=True):
            equal_where_written(actual.cpu(), there)


def test_a_row_is_the_same_alone_and_in_company(gpu: str, kernels: KernelSet) -> None:
    sizes = replace(SMALL, records=6)
    sequences = {slot: make_sequence(sizes, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    together = Layer(kernels, sizes, 3, torch.bfloat16, gpu)
    alone = Layer(kernels, sizes, 3, torch.bfloat16, gpu)
    for rows in mixed_batches():
        for row, out in zip(rows, together.run(rows, sequences), strict=True):
            assert torch.equal(out, alone.run([row], sequences)[0])


class OneByOne:
    """A prompt that is computed token by token."""

    def __init__(self, kernels: KernelSet, sequence: Sequence, length: int, gpu: str) -> None:
        layer = Layer(kernels, SMALL, 1, sequence.x.dtype, gpu)
        outputs, self.states = [], [layer.delta.state.clone()]  # after 0, 1, ... tokens
        for t in range(length):
            outputs += layer.run([Row(0, t, 1, window=False, pending=0)], {0: sequence})
            self.states.append(layer.delta.state.clone())
        self.outputs = torch.cat(outputs)


def test_every_accepted_count_folds_to_the_sequential_state(gpu: str, kernels: KernelSet) -> None:
    """Bit for bit: drafts, a prompt and plain decoding are one computation."""
    sequence, prompt, width = make_sequence(SMALL, LENGTH, 2, torch.float32), 3, SMALL.records
    expected = OneByOne(kernels, sequence, prompt + width + 1, gpu)
    for accepted in range(width + 1):
        layer, done = Layer(kernels, SMALL, 1, torch.float32, gpu), prompt + accepted
        layer.run([Row(0, 0, prompt, window=False, pending=0)], {0: sequence})
        (window,) = layer.run([Row(0, prompt, width, window=True, pending=0)], {0: sequence})
        (out,) = layer.run([Row(0, done, 1, window=True, pending=accepted)], {0: sequence})
        assert torch.equal(layer.delta.state, expected.states[done])
        assert torch.equal(window, expected.outputs[prompt : prompt + width])
        assert torch.equal(out[0], expected.outputs[done])


def test_a_snapshot_is_the_state_at_exactly_its_length(gpu: str, kernels: KernelSet) -> None:
    """Taken while folding (up to 2 tokens) and inside a prompt's chunk (behind them)."""
    sequence = make_sequence(SMALL, LENGTH, 3, torch.float32)
    expected = OneByOne(kernels, sequence, 9, gpu)
    for after in (1, 2, 3, 5):
        layer = Layer(kernels, SMALL, 1, torch.float32, gpu)
        layer.run([Row(0, 0, 4, window=False, pending=0)], {0: sequence})
        layer.run([Row(0, 4, 3, window=True, pending=0)], {0: sequence})
        layer.run([Row(0, 6, 3, False, 2, snapshot_after=after, snapshot_line=2)], {0: sequence})
        assert torch.equal(layer.delta.snapshots[2:3], expected.states[4 + after])
        assert layer.delta.snapshots[[0, 1, 3]].isnan().all()


def test_a_window_takes_no_snapshot_of_its_drafts(gpu: str, kernels: KernelSet) -> None:
    sequence = make_sequence(SMALL, LENGTH, 3, torch.float32)
    layer = Layer(kernels, SMALL, 1, torch.float32, gpu)
    layer.run([Row(0, 0, 3, window=False, pending=0)], {0: sequence})
    layer.run([Row(0, 3, 4, True, pending=0, snapshot_after=3)], {0: sequence})
    assert layer.delta.snapshots.isnan().all()
    assert layer.conv.snapshots.isnan().all()


def test_padding_and_unknown_slots_touch_nothing_else(gpu: str, kernels: KernelSet) -> None:
    """Rows without tokens on the NULL slot, rows that share it, and slots that there are not."""
    sequences = {slot: make_sequence(SMALL, LENGTH, 1, torch.float32) for slot in (-1, 1, 3, 9)}
    layer = Layer(kernels, SMALL, 4, torch.float32, gpu)
    rows = [Row(1, 0, 2, True, 0), Row(3, 0, 1, True, 0), Row(3, 0, 1, True, 0)]
    outputs = layer.run([*rows, Row(3, 0, 0, True, 0), Row(9, 0, 1, True, 0)], sequences)
    layer.run([Row(-1, 0, 1, False, 0, snapshot_after=1)], sequences)
    assert outputs[0].isfinite().all()
    for tensor in (layer.delta.state, *layer.delta[2:]):
        assert tensor[[0, 2]].isnan().all()
        assert not tensor[1].isnan().all()
    assert layer.delta.snapshots.isnan().all()


def test_launches_for_longer_rows_change_no_bit(gpu: str, kernels: KernelSet) -> None:
    """As captured steps have them, which do not know how long a row will be."""

    def wide(op: Any) -> Any:
        return lambda *inputs: op(*inputs[:-1], inputs[-1]._replace(max_tokens=3 * CHUNK))

    ops_for_more = {name: wide(getattr(kernels, name)) for name in ("causal_conv", "gated_delta")}
    sizes = replace(SMALL, records=6)
    sequences = {slot: make_sequence(sizes, LENGTH, slot, torch.bfloat16) for slot in range(3)}
    narrow = Layer(kernels, sizes, 4, torch.bfloat16, gpu)
    layer = Layer(replace(kernels, **ops_for_more), sizes, 4, torch.bfloat16, gpu)
    for rows in mixed_batches():
        expected, actual = (torch.cat(each.run(rows, sequences)) for each in (narrow, layer))
        assert torch.equal(actual, expected)
    for one, other in zip((*layer.delta, *layer.conv), (*narrow.delta, *narrow.conv), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


LONG = CHUNK + 7  # a whole chunk, and a tail


@pytest.mark.parametrize("sizes", [SHARED_KEYS, OWN_KEYS], ids=["shared keys", "own keys"])
def test_long_prompts_equal_the_reference(
    gpu: str, reference: KernelSet, kernels: KernelSet, sizes: Sizes
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
    layer = Layer(kernels, sizes, 4, torch.bfloat16, gpu)
    for rows in batches:
        qkv = torch.cat(expected.convolve(rows, sequences))
        wanted = torch.cat(expected.apply_delta_rule(qkv, rows, sequences))
        near(torch.cat(layer.apply_delta_rule(qkv, rows, sequences)), wanted, gpu)
        for actual, there in zip(layer.delta, expected.delta, strict=True):
            near(actual.cpu(), there, gpu)


def test_keys_that_repeat(gpu: str, reference: KernelSet, kernels: KernelSet) -> None:
    """What a chunk inverts is worst where all keys are one and nothing decays."""
    made = make_sequence(SMALL, LONG, 1, torch.bfloat16)
    gates = torch.cat((torch.full((LONG, 1), 9.0), torch.full((LONG, 1), -9.0)), dim=1).bfloat16()
    sequence = Sequence(made.x[:1].expand(LONG, -1), gates)
    rows = [Row(0, 0, LONG, False, 0, chunked=CHUNK)]
    qkv = sequence.x.contiguous()
    qkv[:, 2 * SMALL.k_dim :] = torch.randn(LONG, SMALL.v_dim)
    wanted = Layer(reference, SMALL, 1, torch.bfloat16).apply_delta_rule(qkv, rows, {0: sequence})
    layer = Layer(kernels, SMALL, 1, torch.bfloat16, gpu)
    near(layer.apply_delta_rule(qkv, rows, {0: sequence})[0], wanted[0], gpu)
