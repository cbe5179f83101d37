"""Digests of pages: the same bits in C and in torch, and other ones for other bytes."""

from __future__ import annotations

import pytest
import torch
from surestep_kernels import KernelSet
from surestep_kernels.digest_pages import digest_pages_reference
from torch import Tensor

LINES = torch.tensor([4, 0, 2])
SHAPES = [(5, 2, 8, 16), (5, 3, 7), (5, 64)]  # a line of the second is no whole number of rows


def pages(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randint(-99, 99, shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("threads", [1, 2])
def test_c_and_torch_agree(native: KernelSet, dtype: torch.dtype, threads: int) -> None:
    native.set_num_threads(threads)
    made = pages(dtype)
    assert torch.equal(native.digest_pages(made, LINES), digest_pages_reference(made, LINES))


def test_every_bit_of_a_line_counts_and_no_other(native: KernelSet) -> None:
    made = pages(torch.bfloat16)
    before = native.digest_pages(made, LINES)
    for page in made:
        data = page[2].flatten().view(torch.uint8)
        for at in range(len(data)):
            data[at] ^= 1 << at % 8
            after = native.digest_pages(made, LINES)
            assert (after != before).tolist() == [False, False, True], at
            data[at] ^= 1 << at % 8


def test_words_and_lines_have_their_places(native: KernelSet) -> None:
    page = torch.zeros(3, 2, 8, dtype=torch.int64)
    page[0, 0, 0] = page[1, 1, 0] = page[2, 0, 1] = 7
    digests = native.digest_pages([page], torch.arange(3))
    same = native.digest_pages([page[:1].expand(3, 2, 8).contiguous()], torch.arange(3))
    assert len({*digests.tolist(), *same.tolist()}) == 5
