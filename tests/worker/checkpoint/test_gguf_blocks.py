"""GGUF's blocks mean what llama.cpp's own library says, bit for bit, wherever they are cut."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.checkpoints.gguf_files import BLOCKS, random_blocks
from surestep_common.errors import InvalidRequest
from surestep_common.gguf.header import BLOCK_TYPES
from surestep_worker.checkpoint.formats import Share
from surestep_worker.checkpoint.formats.gguf import PACKED, UNPACKING, Gguf
from torch import Tensor

ROWS, COLUMNS = 48, 768


def test_sizes_are_the_librarys() -> None:
    for number, block in BLOCK_TYPES.items():
        assert Type(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (block.elements, block.nbytes)
    assert {kind.name for kind in BLOCKS} == set(PACKED) == UNPACKING.keys()


def read(kind: Type, data: np.ndarray, rows: range, columns: range) -> Tensor:
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]

    def part(name: str, rows: slice, columns: slice) -> Tensor:
        assert name == "m.weight"
        assert columns.start % elements == columns.stop % elements == 0
        blocks = slice(columns.start // elements * nbytes, columns.stop // elements * nbytes)
        return torch.from_numpy(data)[rows, blocks]

    weight = Gguf(()).read(Share("m", rows, columns, COLUMNS, kind.name), part)
    assert weight.bits == (4 if kind.name.startswith("Q4") else 8)
    return weight.dequantize()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [range(ROWS), range(7, 8)])
@pytest.mark.parametrize("columns", [range(COLUMNS), range(256, 512), range(32, 416), range(8, 24)])
def test_a_share_is_that_part_of_the_weight(kind: Type, rows: range, columns: range) -> None:
    data = random_blocks(kind, ROWS, COLUMNS, seed=kind.value)
    expected = gguf.dequantize(data, kind)
    assert expected.dtype == np.float32
    part = expected[rows.start : rows.stop, columns.start : columns.stop]
    assert np.array_equal(read(kind, data, rows, columns).numpy(), part)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_cut_inside_of_what_shares_a_lane_is_refused(kind: Type) -> None:
    data = random_blocks(kind, 4, COLUMNS, seed=1)
    with pytest.raises(InvalidRequest, match="m: inputs 4 to 200 of 768 cut groups"):
        read(kind, data, range(4), range(4, 200))


@pytest.mark.parametrize("half", [np.inf, np.nan])
def test_infinite_scales_are_refused(half: float) -> None:
    data = random_blocks(Type.Q4_1, 4, COLUMNS, seed=1)
    data[1, 2:4] = np.array([half], dtype=np.float16).view(np.uint8)
    with pytest.raises(InvalidRequest, match=r"m\.weight holds NaN or infinity"):
        read(Type.Q4_1, data, range(4), range(COLUMNS))
