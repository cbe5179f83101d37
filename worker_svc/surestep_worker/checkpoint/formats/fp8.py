"""FP8 weights, E4M3, with a scale for each block of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import MXFP4_GROUP, e8m0
from torch import Tensor

from .format import (
    EVERYTHING,
    EXPONENTS,
    FLOATS,
    Format,
    Read,
    Share,
    Stored,
    Types,
    blocks_of,
    exponents,
    group_size_of,
    slice_of,
)

_TYPE = "F8_E4M3"
_NAN = 0x7F
_SQUARE = 128, 128  # rows, columns


@dataclass(frozen=True, slots=True)
class Fp8(Format):
    """E4M3 weights with a scale per block of rows and columns.

    Blocks are squares as DeepSeek and Qwen publish them, whole rows, or the whole weight. Every row
    gets a copy of its block's scales, so that weights may be merged and cut anywhere between rows.
    """

    block: tuple[int, int] | None  # rows, columns; None: the shape of the scales tells
    scale: str = "weight_scale_inv"  # name of the scales, which multiply in spite of "inv"
    parted: bool = False  # scales [N / rows, 1, K / columns, 1]
    _scale_types: ClassVar[tuple[str, ...]] = FLOATS

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there is a weight in FP8, or a scale of no other format's."""
        weight = f"{module}.weight"
        if weight in types and types.dtype(weight) not in FLOATS:
            return types.dtype(weight) == _TYPE
        return f"{module}.{self.scale}" in types and f"{module}.weight_packed" not in types

    def format_of(self, module: str, types: Types) -> Format | None:
        """Return the format of a module, with the blocks of its scales."""
        if not self.holds(module, types):
            return None
        return self if self.block is not None else replace(self, block=self._block(module, types))

    def _block(self, module: str, types: Types) -> tuple[int, int]:
        """Return a row where each has a scale, otherwise everything."""
        scale, weight = f"{module}.{self.scale}", f"{module}.weight"
        shape = types.shape(scale) if scale in types else ()
        by_row = len(shape) > 0 and weight in types and shape[0] == types.shape(weight)[0] > 1
        return (1 if by_row else EVERYTHING, EVERYTHING)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Blocks at the lower and right borders may be smaller."""
        assert self.block is not None
        blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
        scales = Stored(blocks, self._scale_types, shortened=self.block[1] == EVERYTHING)
        if self.parted:
            scales = Stored((blocks[0], 1, blocks[1], 1), self._scale_types)
        return {
            f"{module}.weight": Stored((rows, columns), (_TYPE,)),
            f"{module}.{self.scale}": scales,
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        assert self.block is not None
        module, (height, width) = share.module, self.block
        group_size = group_size_of(width, share)
        codes = read(f"{module}.weight", slice_of(share.rows), slice_of(share.columns)).contiguous()
        if (codes.view(torch.uint8) & _NAN == _NAN).any():
            raise InvalidRequest(f"{module}.weight holds NaN", param="model")
        rows, columns = slice_of(share.rows, height), slice_of(share.columns, width)
        blocks = self._scales(read(f"{module}.{self.scale}", rows, columns), module)
        by_row = blocks[blocks_of(share.rows, height)]
        scales = by_row[:, blocks_of(share.columns, width, group_size)].contiguous()
        return QuantizedWeight(codes, scales, None, group_size)

    def _scales(self, stored: Tensor, module: str) -> Tensor:
        return stored.float()


@dataclass(frozen=True, slots=True)
class ModelOptFp8(Fp8):
    """E4M3 weights as ModelOpt writes them: with a scale for each row, for each square of 128 rows
    and columns (FP8_PB_WO), or for all.
    """

    block: tuple[int, int] | None = None
    scale: str = "weight_scale"

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there is a weight in FP8 whose scales are no powers of two."""
        scale = f"{module}.{self.scale}"
        is_mx = scale in types and types.dtype(scale) in EXPONENTS
        return Fp8.holds(self, module, types) and not is_mx

    def format_of(self, module: str, types: Types) -> Format | None:
        """Return the format of a module, whose scales tell by name and shape which they are."""
        if not self.holds(module, types):
            return None
        if f"{module}.weight_scale_inv" in types:
            return replace(self, block=_SQUARE, scale="weight_scale_inv")
        scale = f"{module}.{self.scale}"
        shape = types.shape(scale) if scale in types else ()
        if len(shape) == 4 or (len(shape) == 2 and shape[1] > 1):
            return replace(self, block=_SQUARE, parted=len(shape) == 4)
        return Fp8.format_of(self, module, types)


@dataclass(frozen=True, slots=True)
class Mxfp8(Fp8):
    """MXFP8: E4M3 weights, a power of two for every 32 inputs (OCP Microscaling Formats 1.0)."""

    block: tuple[int, int] | None = (1, MXFP4_GROUP)
    scale: str = "weight_scale"
    _scale_types: ClassVar[tuple[str, ...]] = EXPONENTS

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there is a weight in FP8 whose scales are not in another format."""
        weight, scale = f"{module}.weight", f"{module}.{self.scale}"
        held = weight in types and types.dtype(weight) == _TYPE
        return held and (scale not in types or types.dtype(scale) in EXPONENTS)

    def _scales(self, stored: Tensor, module: str) -> Tensor:
        return e8m0(exponents(stored, f"{module}.{self.scale}"))
