"""Weights of four and six bits: MXFP4, NVFP4 and MXFP6, under the names of those who write them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import MXFP4_GROUP, e8m0
from torch import Tensor

from .format import (
    EXPONENTS,
    Format,
    Read,
    Share,
    Stored,
    Types,
    blocks_of,
    exponents,
    finite,
    group_size_of,
    refuse_sizes,
    slice_of,
)
from .integers import Numbers
from .words import Packing

_BLOCK_BYTES = MXFP4_GROUP // 2
_NVFP4_GROUPS = 16, 32  # inputs; NVIDIA's ModelOpt has the latter, too
_OF_BLOCKS = "blocks", "scales"
_MOST_E2M3 = 60  # eighths
_E2M3 = [  # eighths that each code stands for, plus 60: a sign, two bits of exponent, three more
    _MOST_E2M3 + sign * (code if code < 8 else (8 + code % 8) << (code // 8 - 1))
    for sign in (1, -1)
    for code in range(32)
]


@dataclass(frozen=True, slots=True)
class _Mxfp4(Format):
    """E2M1 weights, a power of two for every 32 inputs (OCP Microscaling Formats 1.0).

    A byte holds two neighbouring inputs, the first in its low half.
    """

    @abstractmethod
    def _names(self, module: str) -> tuple[str, str]:
        """Return the names of codes and scales."""

    @abstractmethod
    def _read_codes(self, name: str, rows: slice, blocks: slice, read: Read) -> Tensor:
        """Read the bytes u8[R, 16 B] of B blocks."""

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read whole blocks of inputs. Raise InvalidRequest for a cut inside one, and for NaN."""
        (codes, scale), rows, columns = self._names(share.module), share.rows, share.columns
        if columns.start % MXFP4_GROUP or columns.stop % MXFP4_GROUP:
            raise InvalidRequest(
                f"{share.module}: inputs {columns.start} to {columns.stop} of {share.inputs} cut"
                f" blocks of {MXFP4_GROUP}",
                param="tensor_parallel_size",
            )
        place = slice_of(rows), slice_of(columns, MXFP4_GROUP)
        scales = exponents(read(scale, *place), scale)
        return QuantizedWeight(
            _unpack(self._read_codes(codes, *place, read)), scales, None, MXFP4_GROUP
        )

    def _check(self, module: str, rows: int, columns: int) -> None:
        """Refuse blocks that are not full."""
        if columns % MXFP4_GROUP:
            wanted = f"inputs must be a multiple of {MXFP4_GROUP}"
            refuse_sizes(module, "MXFP4", rows, columns, wanted)


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks(_Mxfp4):
    """MXFP4 as gpt-oss is published: codes [N, K / 32, 16]."""

    def holds(self, module: str, types: Types) -> bool:
        """Look for either tensor; plain modules have none of them."""
        return any(f"{module}_{name}" in types for name in _OF_BLOCKS)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return both tensors. Blocks must be full."""
        self._check(module, rows, columns)
        blocks = columns // MXFP4_GROUP
        return {
            f"{module}_blocks": Stored((rows, blocks, _BLOCK_BYTES), ("U8",)),
            f"{module}_scales": Stored((rows, blocks), EXPONENTS),
        }

    def _names(self, module: str) -> tuple[str, str]:
        return f"{module}_blocks", f"{module}_scales"

    def _read_codes(self, name: str, rows: slice, blocks: slice, read: Read) -> Tensor:
        return read(name, rows, blocks).flatten(1)


@dataclass(frozen=True, slots=True)
class Mxfp4Packed(_Mxfp4):
    """MXFP4 as compressed-tensors and ModelOpt have it: codes [N, K / 2]."""

    codes: str = "weight_packed"

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there are packed bytes, and no scales of NVFP4."""
        codes, scale = self._names(module)
        is_packed = codes in types and types.dtype(codes) == "U8"
        return is_packed and (scale not in types or types.dtype(scale) in EXPONENTS)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return both tensors. Blocks must be full."""
        self._check(module, rows, columns)
        codes, scale = self._names(module)
        return {
            codes: Stored((rows, columns // 2), ("U8",)),
            scale: Stored((rows, columns // MXFP4_GROUP), EXPONENTS),
        }

    def _names(self, module: str) -> tuple[str, str]:
        return f"{module}.{self.codes}", f"{module}.weight_scale"

    def _read_codes(self, name: str, rows: slice, blocks: slice, read: Read) -> Tensor:
        return read(name, rows, slice(blocks.start * _BLOCK_BYTES, blocks.stop * _BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Nvfp4(Format):
    """E2M1 weights, an E4M3 scale for every 16 or 32 inputs and one scale for all of them.

    Bytes are as those of MXFP4. Scales of inputs are not read: inputs are multiplied as they are.
    """

    codes: str = "weight_packed"
    whole: str = "weight_global_scale"  # of all scales
    divides: bool = True  # it does; otherwise it multiplies
    group: int = _NVFP4_GROUPS[0]

    def format_of(self, module: str, types: Types) -> Format | None:
        """Return the format of a module, with the groups that the shapes of its tensors tell."""
        codes, scale = f"{module}.{self.codes}", f"{module}.weight_scale"
        if not self.holds(module, types) or codes not in types or scale not in types:
            return self if self.holds(module, types) else None
        inputs, groups = 2 * types.shape(codes)[-1], types.shape(scale)[-1:]
        fits = [size for size in _NVFP4_GROUPS if groups == (-(-inputs // size),)]
        return replace(self, group=fits[0]) if fits else self

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there is a scale of all, or bytes with scales in FP8."""
        codes, scale = f"{module}.{self.codes}", f"{module}.weight_scale"
        in_bytes = codes in types and types.dtype(codes) == "U8"
        with_fp8 = scale in types and types.dtype(scale) == "F8_E4M3"
        return f"{module}.{self.whole}" in types or (in_bytes and with_fp8)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Groups must be full."""
        if columns % self.group:
            wanted = f"inputs must be a multiple of {self.group}"
            refuse_sizes(module, "NVFP4", rows, columns, wanted)
        return {
            f"{module}.{self.codes}": Stored((rows, columns // 2), ("U8",)),
            f"{module}.weight_scale": Stored((rows, columns // self.group), ("F8_E4M3",)),
            f"{module}.{self.whole}": Stored((1, 1), ("F32",), shortened=True),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        module, columns = share.module, share.columns
        group_size = group_size_of(self.group, share)
        rows, groups = slice_of(share.rows), slice_of(columns, self.group)
        first = columns.start - groups.start * self.group
        every = slice(groups.start * self.group // 2, groups.stop * self.group // 2)
        codes = _unpack(read(f"{module}.{self.codes}", rows, every))
        whole = read(f"{module}.{self.whole}", slice(0, 1), slice(0, 1))
        scales = read(f"{module}.weight_scale", rows, groups).float()
        scales = scales / whole if self.divides else scales * whole
        owners = blocks_of(columns, self.group, group_size)
        return QuantizedWeight(
            codes[:, first : first + len(columns)].contiguous(),
            finite(scales[:, owners].contiguous(), f"{module}.weight_scale"),
            None,
            group_size,
        )


@dataclass(frozen=True, slots=True)
class Mxfp6(Format):
    """E2M3 weights, a power of two for every 32 inputs: whole numbers of eighths, up to 60.

    Three bytes hold four neighbouring inputs, the first in the lowest bits.
    """

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there are packed bytes."""
        codes = f"{module}.weight_packed"
        return codes in types and types.dtype(codes) == "U8"

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return both tensors. Blocks must be full."""
        if columns % MXFP4_GROUP:
            refuse_sizes(
                module, "MXFP6", rows, columns, f"inputs must be a multiple of {MXFP4_GROUP}"
            )
        return {
            f"{module}.weight_packed": Stored((rows, 6 * columns // 8), ("U8",)),
            f"{module}.weight_scale": Stored((rows, columns // MXFP4_GROUP), EXPONENTS),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read the blocks that have a part in a share. Also raises for NaN."""
        rows, columns, scale = slice_of(share.rows), share.columns, f"{share.module}.weight_scale"
        blocks, packing = slice_of(columns, MXFP4_GROUP), Packing(6)
        block_bytes = 6 * MXFP4_GROUP // 8
        data = read(
            f"{share.module}.weight_packed",
            rows,
            slice(blocks.start * block_bytes, blocks.stop * block_bytes),
        )
        start = columns.start % MXFP4_GROUP
        codes = packing.unpack(
            data.contiguous().view(torch.int32), range(start, start + len(columns))
        )
        values = torch.tensor(_E2M3, dtype=torch.uint8)[codes.int()]
        scales = e8m0(exponents(read(scale, rows, blocks), scale)) / 8
        zeros = torch.full_like(scales, _MOST_E2M3, dtype=torch.int32)
        return Numbers(values, zeros, scales, 8).in_order(share, MXFP4_GROUP)


def _unpack(data: Tensor) -> Tensor:
    """Return codes u8[R, 2 B] of bytes u8[R, B]: each becomes the two of a 16-bit word."""
    words = data.contiguous().short()
    words |= words << 4
    words &= 0x0F0F
    return words.view(torch.uint8)
