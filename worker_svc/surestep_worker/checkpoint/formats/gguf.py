"""Weights in GGUF files: blocks of several types, often more than one in a file.

A block becomes codes, and a scale and a min for each group of them. W = codes * scales + mins holds
exactly in float32 where the format's own arithmetic is exact, and is rounded once where that is.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_common.gguf.header import BLOCK_TYPE_OF
from surestep_kernels import QuantizedWeight
from torch import Tensor

from .format import FLOATS, Format, Read, Share, Stored, Types, blocks_of, group_size_of

PACKED = tuple(name for name in BLOCK_TYPE_OF if name not in FLOATS)


class Groups(NamedTuple):
    """Codes of a matrix [N, K] in groups of g inputs."""

    codes: Tensor  # u8[N, K]
    scales: Tensor  # f32[N, K / g]
    mins: Tensor  # f32[N, K / g]


class Unpacking(NamedTuple):
    """Way to unpack blocks of a type."""

    group_size: int
    bits: int  # of a code, as it is kept
    nbytes: int  # of a block
    unpack: Callable[[Tensor], Groups]  # of blocks u8[N, B, nbytes]

    def __call__(self, data: Tensor) -> Groups:
        """Unpack the bytes u8[N, B * nbytes] of a matrix."""
        groups = self.unpack(data.reshape(len(data), -1, self.nbytes))
        return Groups(*(part.flatten(1).contiguous() for part in groups))


def _q4_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[..., :2])
    return Groups(_nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[..., :2])
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Groups(codes, scales, -16 * scales)


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Groups(codes, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[..., :2])
    return Groups(blocks[..., 2:] ^ 0x80, scales, -128 * scales)  # signed numbers plus 128


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(_nibbles(_rows(blocks[..., 16:], 4)), *_scales_and_mins(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = blocks[..., None, 16:48] >> shifts & 1  # [N, B, 8, 32]: a bit plane for each group
    codes = _nibbles(_rows(blocks[..., 48:], 4)).unflatten(-1, (8, 32)) | high << 4
    return Groups(codes.flatten(-2), *_scales_and_mins(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    """128 bytes of the low halves of codes, 64 of their other two bits, 16 scales, one of those."""
    low = _rows(blocks[..., :128], 2)  # [N, B, 2, 64]: each holds 128 codes
    low = torch.stack((low & 0xF, low >> 4), dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = _rows(blocks[..., 128:192], 2)[..., None, :] >> shifts & 3  # [N, B, 2, 4, 32]
    scales = _halves(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8)
    return Groups((low | high << 4).flatten(-3), scales, -32 * scales)


def _halves(data: Tensor) -> Tensor:
    """Return float16 numbers as f32[..., n / 2] of their bytes u8[..., n]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return u8[..., 2 n] of bytes u8[..., n]: of each row the low halves, then the high ones.

    Further dimensions than two of blocks are rows, one after the other.
    """
    halves: Tensor = torch.stack((data & 0xF, data >> 4), dim=-2)
    return halves.flatten(2)


def _rows(data: Tensor, rows: int) -> Tensor:
    """Return bytes u8[N, B, n] as [N, B, rows, n / rows]."""
    split: Tensor = data.unflatten(-1, (rows, data.shape[-1] // rows))
    return split


def _bits(data: Tensor) -> Tensor:
    """Return the bits u8[..., 8 n] of bytes u8[..., n], the lowest of each first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits: Tensor = data[..., None] >> shifts & 1
    return bits.flatten(-2)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return both of the 8 groups of a block: f32[N, B, 8] each.

    Two numbers in float16 multiply 8 scales and 8 mins of 6 bits in 12 bytes: the low bits of the
    first four of each kind fill 8 bytes, whose upper bits complete the others.
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 0xF | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales * _halves(blocks[..., :2]), -mins.float() * _halves(blocks[..., 2:4])


UNPACKING: Mapping[str, Unpacking] = {
    "Q4_0": Unpacking(32, 4, 18, _q4_0),
    "Q4_1": Unpacking(32, 4, 20, _q4_1),
    "Q5_0": Unpacking(32, 8, 22, _q5_0),
    "Q5_1": Unpacking(32, 8, 24, _q5_1),
    "Q8_0": Unpacking(32, 8, 34, _q8_0),
    "Q4_K": Unpacking(32, 4, 144, _q4_k),
    "Q5_K": Unpacking(32, 8, 176, _q5_k),
    "Q6_K": Unpacking(16, 8, 210, _q6_k),
}


@dataclass(frozen=True, slots=True)
class Gguf(Format):
    """Blocks of codes, with a scale and maybe a min for each group of them."""

    merges_with_plain: ClassVar[bool] = True

    def holds(self, module: str, types: Types) -> bool:
        """Return whether the weight is packed in blocks."""
        weight = f"{module}.weight"
        return weight in types and types.dtype(weight) in PACKED

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensor, which holds everything."""
        return {f"{module}.weight": Stored((rows, columns), PACKED)}

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read the blocks that have a part in a share. Also raises for infinite scales."""
        assert share.dtype is not None
        unpacking, block = UNPACKING[share.dtype], BLOCK_TYPE_OF[share.dtype].elements
        group_size = group_size_of(unpacking.group_size, share)
        first = share.columns.start // block * block
        whole = slice(first, -(-share.columns.stop // block) * block)
        rows = slice(share.rows.start, share.rows.stop)
        groups = unpacking(read(f"{share.module}.weight", rows, whole))
        inner = range(share.columns.start - first, share.columns.stop - first)
        owners = blocks_of(inner, unpacking.group_size, group_size)
        owners += inner.start // unpacking.group_size
        scales, mins = groups.scales[:, owners], groups.mins[:, owners]
        # Products of halves and bytes: no sum of theirs is infinite without an infinite one.
        if not (scales.sum() + mins.sum()).isfinite():
            raise InvalidRequest(f"{share.module}.weight holds NaN or infinity", param="model")
        codes = groups.codes[:, inner.start : inner.stop].contiguous()
        return QuantizedWeight(codes, scales, None, group_size, mins, unpacking.bits)
