from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.kernels.slots import SLOTS, VOCAB, WIDTH, bounds, i32, randint
from surestep_kernels import KernelSet
from surestep_kernels.shape_logits import Biases, Forbidden, Masks, Penalties, Positions, Shaping

KNOWN, HISTORY = 13, 70  # tokens of a history, all of them, and its length


def allowing(*ids: int) -> torch.Tensor:
    """A line of Masks that allows these tokens; bits behind the vocabulary are of no meaning."""
    bits = torch.zeros(-(-VOCAB // 32) * 32, dtype=torch.bool)
    bits[list(ids)], bits[VOCAB:] = True, True
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int32).copy())


def make_shaping() -> Shaping:
    """Three windows of two positions; each wish is that of two windows."""
    values, never = torch.randn(5), torch.iinfo(torch.int32).max
    positions = i32(0, 1, 4, 5)
    return Shaping(
        Biases(positions, i32(0, 2, 2, 5), i32(3, 1099, 0, 5, 6), values, i32(0, 0, 1)),
        Penalties(
            positions,
            i32(4, 9, 30),
            torch.tensor([1.3, 1.0, 0.7]),
            torch.tensor([0.5, 0.0, 1.1]),
            torch.tensor([0.9, 0.0, -0.3]),
        ),
        Forbidden(
            i32(2, 3, 4, 5),
            i32(0, 0, 2, 4),
            i32(0, 1, 3, 6, 7),
            i32(11, 21, 12, 21, 22, 5, 14),
            i32(25, never, never, 10),
            i32(4, 9, 30),
        ),
        Masks(i32(3, 4), torch.stack((allowing(*range(0, VOCAB, 3)), allowing(5, 6, 17)))),
    )


def test_shapes_logits_as_the_reference_does(column: KernelSet, reference: KernelSet) -> None:
    tokens = randint(0, VOCAB, SLOTS + 1, WIDTH)
    tokens[2, 23], tokens[3, 38:40] = 21, i32(21, 22)
    where = Positions(
        i32(0, 0, 1, 1, 2, 2), i32(1, 1, 2, 2, 3, 3), i32(20, 21, 24, 25, 40, 41), tokens
    )
    z = torch.randn(6, VOCAB)
    z[1, 50], z[5, 13], z[2, 11], z[4, 60] = torch.nan, torch.inf, torch.nan, -torch.inf
    shaping = make_shaping()
    expected, actual = z.clone(), z.clone()
    reference.step.shape_logits(expected, where, shaping)
    column.step.shape_logits(actual, where, shaping)
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().nonzero().tolist() == [[1, 50], [2, 11], [5, 13]]
    assert expected[2, 12] == -torch.inf  # 21 stands in front of it
    assert expected[3, 12] == z[3, 12]
    assert expected[4, 5] == -torch.inf  # 21 and 22 stand in front of it
    assert (expected[4:] > -torch.inf).sum(dim=1).tolist() == [1, 3]  # one of the two is masked
    assert (expected[3] > -torch.inf).nonzero().flatten().tolist() == list(range(0, VOCAB, 3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, as interpreter
@pytest.mark.parametrize("vocab", [21, 64, 75])
@pytest.mark.parametrize(
    ("column", "count"),
    [*(("c", n) for n in (0, 1, 2, 31, 300)), ("triton", 2), ("triton", 31)],
    indirect=["column"],
)
def test_logits_are_shaped(column: KernelSet, reference: KernelSet, count: int, vocab: int) -> None:
    """Ids of biases in no order, long histories of few tokens, sequences of any length."""
    index = torch.arange(count, dtype=torch.int32)
    least = -2 if column.step.synchronous else 0  # behind drafts are none; a GPU may count them
    tokens = randint(least, KNOWN, count + 1, HISTORY)
    at = Positions(index, index, randint(0, HISTORY + 1, count), tokens)
    listed = torch.stack([torch.randperm(vocab)[:3] for _ in range(count + 1)]).int().flatten()
    sequences = bounds(torch.full((count,), 2))
    words = torch.randint(-(1 << 31), 1 << 31, ((count + 1) // 2, -(-vocab // 32))).int()
    words[1::3], words[2::3] = 0, -1  # whole words are done at once
    cu_ids = bounds(randint(1, 4, 2 * count + 1))
    shaping = Shaping(
        Biases(index, sequences, listed, torch.randn(len(listed)) * 9, randint(0, 2, count)),
        Penalties(
            index,
            randint(0, HISTORY, count),
            torch.rand(count) + 0.5,
            torch.randn(count),
            torch.randn(count),
        ),
        Forbidden(
            index,
            sequences,
            cu_ids,
            randint(0, KNOWN, int(cu_ids[-1])),
            randint(0, 2 * HISTORY, 2 * count + 1),
            randint(0, HISTORY, count),
        ),
        Masks(index[::2].contiguous(), words),
    )
    z = torch.randn(count, vocab)
    z[:, 7], z[::3, 5], z[::4, 2] = 3e38, math.nan, math.inf
    expected, actual = z.clone(), z.clone()
    reference.step.shape_logits(expected, at, shaping)
    column.step.shape_logits(actual, at, shaping)
    actual[actual.isposinf()] = math.nan  # of these two a logit that nobody asks about may be any
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
