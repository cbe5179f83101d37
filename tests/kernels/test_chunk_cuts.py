"""In bf16 too, no bit of a gated delta layer depends on how a sequence was cut into rows.

Chunks round otherwise than their tokens one by one. So the proof is over states, snapshots and
outputs, for a sequence of whole chunks, the tail of a prompt and tokens that were emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from support.kernels.columns import triton_kernels
from support.kernels.recurrent_cases import Layer, Row, Sequence, Sizes, make_sequence
from surestep_kernels import KernelSet
from surestep_kernels.gated_delta.chunks import CHUNK
from torch import Tensor

SIZES = Sizes(k_heads=1, v_heads=1, k_dim=16, v_dim=16, records=4)
PROMPT, LENGTH = 2 * CHUNK + 5, 2 * CHUNK + 9  # the last four were emitted
WHOLE = PROMPT // CHUNK * CHUNK


def slow(length: int, seed: int) -> Sequence:
    """Inputs of a state that forgets little: a difference of long ago is seen at the end."""
    made = make_sequence(SIZES, length, seed, torch.bfloat16)
    return Sequence(made.x, made.beta_and_decay - torch.tensor([2.0, 6.0]).bfloat16())


SEQUENCE = slow(LENGTH, 0)

Chunked = Callable[[int, int], int]  # of a row's first token and number of tokens
State = list[Tensor]


@pytest.fixture
def kernels(gpu: str) -> KernelSet:
    return triton_kernels(gpu)


def of_the_sequence(first: int, n: int) -> int:
    return min(max(WHOLE - first, 0), n)


def of_the_row(first: int, n: int) -> int:
    """The mutant: chunks are counted from where a row begins, in any row that is long enough."""
    return n // CHUNK * CHUNK


def held(layer: Layer) -> State:
    """What slot 0 holds."""
    return [layer.delta.state[0], layer.conv.inputs[0, :3]]


def computed(
    kernels: KernelSet, borders: Iterable[int], chunked: Chunked = of_the_sequence
) -> State:
    """State and outputs behind a sequence that is cut there."""
    layer, outputs = Layer(kernels, SIZES, 1, torch.bfloat16), []
    for first, end in pairwise([0, *borders, LENGTH]):
        row = Row(0, first, end - first, False, 0, chunked=chunked(first, end - first))
        outputs += layer.run([row], {0: SEQUENCE})
    return [*held(layer), torch.cat(outputs)]


def equal(a: State, b: State) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CUTS = [
    *([at] for at in (CHUNK, 2 * CHUNK)),
    *([at] for at in range(WHOLE + 1, LENGTH)),
    [CHUNK, 2 * CHUNK, WHOLE + 2, PROMPT, PROMPT + 1],
    [CHUNK, *range(WHOLE, LENGTH)],
]


def test_every_cut_gives_the_same_bits(kernels: KernelSet) -> None:
    whole = computed(kernels, [])
    for borders in CUTS:
        assert equal(computed(kernels, borders), whole), borders


@pytest.mark.parametrize("borders", [[36], [CHUNK + 1], [CHUNK, CHUNK + 30]])
def test_the_proof_sees_chunks_that_are_counted_from_a_row(
    kernels: KernelSet, borders: list[int]
) -> None:
    whole = computed(kernels, [], of_the_row)
    assert not equal(computed(kernels, borders, of_the_row), whole)


def test_chunks_round_otherwise_than_their_tokens(kernels: KernelSet) -> None:
    """Or nothing here proves anything."""
    one_by_one = computed(kernels, [], lambda first, n: 0)
    assert not equal(one_by_one, computed(kernels, []))


@pytest.mark.parametrize("at", [CHUNK, 2 * CHUNK, WHOLE + 3])
def test_a_snapshot_is_gone_on_from_to_the_same_bits(kernels: KernelSet, at: int) -> None:
    """Another slot starts with the state that a row left on its way."""
    layer = Layer(kernels, SIZES, 2, torch.bfloat16)
    layer.run([Row(0, 0, LENGTH, False, 0, at, 2, WHOLE)], {0: SEQUENCE})
    layer.delta.state[1] = layer.delta.snapshots[2]
    layer.conv.inputs[1, :3] = layer.conv.snapshots[2]
    n = LENGTH - at
    layer.run([Row(1, at, n, False, 0, chunked=of_the_sequence(at, n))], {1: SEQUENCE})
    assert torch.equal(layer.delta.state[1], layer.delta.state[0])
    assert torch.equal(layer.conv.inputs[1, :3], layer.conv.inputs[0, :3])


@pytest.mark.parametrize("accepted", [1, 3, 4])
def test_what_was_emitted_is_computed_again_to_the_same_bits(
    kernels: KernelSet, accepted: int
) -> None:
    """By windows with drafts, some rejected, or as known tokens after a preemption or a fault."""
    served = Layer(kernels, SIZES, 1, torch.bfloat16)
    served.run([Row(0, 0, PROMPT, False, 0, chunked=WHOLE)], {0: SEQUENCE})
    (window,) = served.run([Row(0, PROMPT, 4, True, 0)], {0: SEQUENCE})
    at = PROMPT + accepted
    again = Layer(kernels, SIZES, 1, torch.bfloat16)
    (replayed,) = again.run([Row(0, 0, at, False, 0, chunked=WHOLE)], {0: SEQUENCE})
    assert torch.equal(replayed[PROMPT:], window[:accepted])
    if at < LENGTH:  # the next row folds what was accepted
        (next_,) = served.run([Row(0, at, 1, True, accepted)], {0: SEQUENCE})
        (same,) = again.run([Row(0, at, 1, True, 0)], {0: SEQUENCE})
        assert torch.equal(next_, same)
        assert equal(held(served)[:1], held(again)[:1])


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_neighbours_of_any_size_change_nothing(kernels: KernelSet, size: int) -> None:
    sequences = {0: SEQUENCE, 1: slow(2 * CHUNK, 1)}
    layer = Layer(kernels, SIZES, 2, torch.bfloat16)
    beside = Row(1, 0, size, False, 0, chunked=size // CHUNK * CHUNK)
    _, mine = layer.run([beside, Row(0, 0, LENGTH, False, 0, chunked=WHOLE)], sequences)
    assert equal([*held(layer), mine], computed(kernels, []))
