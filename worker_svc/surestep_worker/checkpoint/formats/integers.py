"""Weights that are whole numbers, less a zero point, times a scale of a group of inputs.

Numbers of up to 4 bits become INT4. Those of more, and scales of more than 16 bits, become codes
with minima, of which a zero point times its scale is rounded once, if at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import GROUP_MULTIPLE
from torch import Tensor

from .format import (
    EVERYTHING,
    FLOATS,
    Format,
    Read,
    Share,
    Stored,
    Types,
    Weight,
    blocks_of,
    finite,
    group_size_of,
    grouped,
    refuse_sizes,
    slice_of,
)
from .words import Packing, unpack_nibbles

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each output within the word
_MOST_INT4 = 15  # zero point, and code
_SCALE, _WHOLE, _FACTORS = "weight_scale", "weight_scale_2", "pre_quant_scale"  # ModelOpt's
_SCALE_BITS = 0xF  # of a scale in fp32, free for the zero point of INT4


class Numbers(NamedTuple):
    """Whole numbers [N, K], with the zero points and the scales [N, K / g] of their groups."""

    codes: Tensor  # u8
    zeros: Tensor  # i32
    scales: Tensor  # f32
    bits: int

    def in_order(self, share: Share, group: int) -> QuantizedWeight:
        """Return the weight of a share whose groups are `group` neighbouring inputs."""
        group_size = group_size_of(group, share)
        every = blocks_of(share.columns, group, group_size)
        codes, scales = self.codes.contiguous(), self.scales[:, every].contiguous()
        zeros = self.zeros[:, every].contiguous()
        short = self.bits <= 4 and not (scales.view(torch.int32) & _SCALE_BITS).any()
        if short and not (zeros > _MOST_INT4).any():
            return QuantizedWeight(codes, scales, zeros.to(torch.uint8), group_size)
        bits = 4 if self.bits <= 4 else 8
        return QuantizedWeight(codes, scales, None, group_size, -zeros * scales, bits)

    def in_another_order(self, owners: Tensor) -> Tensor:
        """Return the weight f32[N, K] whose input k is of group owners[k]."""
        return (self.codes.float() - self.zeros[:, owners]) * self.scales[:, owners]


@dataclass(frozen=True, slots=True)
class _Transposed(Format):
    """Words of codes and of zero points, and scales, for inputs times outputs."""

    def holds(self, module: str, types: Types) -> bool:
        """Return whether any of the tensors is present; unquantised modules have none of them."""
        return any(f"{module}.{name}" in types for name in ("qweight", "qzeros", "scales"))


@dataclass(frozen=True, slots=True)
class Awq(_Transposed):
    """4-bit weights, a scale and a zero point per output and group of inputs (Lin et al., 2024).

    Stored as AutoAWQ's "gemm": transposed, the codes of eight neighbouring outputs in one int32.
    """

    group_size: int  # inputs; -1: all

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Words must be full."""
        word = len(_AWQ_PLACES)
        if rows % word:
            refuse_sizes(module, "AWQ", rows, columns, f"outputs must be a multiple of {word}")
        words, groups = rows // word, -(-columns // grouped(columns, self.group_size))
        return {
            f"{module}.qweight": Stored((columns, words), ("I32",)),
            f"{module}.qzeros": Stored((groups, words), ("I32",)),
            f"{module}.scales": Stored((groups, rows), ("F16", "BF16")),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        module, group = share.module, grouped(share.inputs, self.group_size)
        word = len(_AWQ_PLACES)
        words, groups = slice_of(share.rows, word), slice_of(share.columns, group)
        first = share.rows.start - words.start * word
        rows = slice(first, first + len(share.rows))
        packed = read(f"{module}.qweight", slice_of(share.columns), words)
        codes = unpack_nibbles(packed, _AWQ_PLACES).T[rows]
        zeros = unpack_nibbles(read(f"{module}.qzeros", groups, words), _AWQ_PLACES).T[rows]
        scales = read(f"{module}.scales", groups, slice_of(share.rows)).float().T
        return Numbers(codes, zeros.int(), scales, 4).in_order(share, group)


@dataclass(frozen=True, slots=True)
class Gptq(_Transposed):
    """Weights of 2 to 8 bits, a scale and a zero per output and group (Frantar et al., 2023).

    Stored transposed: words hold codes of neighbouring inputs, and zero points of neighbouring
    outputs. Where inputs were grouped in another order than that of their places,
    `g_idx` has the group of each, and no layout of ours holds the weight.
    """

    group_size: int  # inputs; -1: all
    zero_offset: int  # of AutoGPTQ's first format, which stores zero points minus 1
    bits: int = 4
    has_index: bool = True  # there is a g_idx
    planes: bool = False  # see Packing

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Words must be full."""
        packing = Packing(self.bits, self.planes)
        if rows % packing.numbers or columns % packing.numbers:
            wanted = f"both must be multiples of {packing.numbers}"
            refuse_sizes(module, f"GPTQ in {self.bits} bits", rows, columns, wanted)
        groups = -(-columns // grouped(columns, self.group_size))
        tensors = {
            f"{module}.qweight": Stored((packing.words(columns), rows), ("I32",)),
            f"{module}.qzeros": Stored((groups, packing.words(rows)), ("I32",)),
            f"{module}.scales": Stored((groups, rows), ("F16", "BF16")),
        }
        if self.has_index:
            tensors[f"{module}.g_idx"] = Stored((columns,), ("I32",))
        return tensors

    def read(self, share: Share, read: Read) -> Weight:
        """Read a share. Also raises InvalidRequest for zero points of more bits than codes have."""
        module, group = share.module, grouped(share.inputs, self.group_size)
        packing, rows = Packing(self.bits, self.planes), slice_of(share.rows)
        owners = None
        if self.has_index:
            owners = read_owners(f"{module}.g_idx", share, group, read)
        groups = slice_of(share.columns, group) if owners is None else slice(0, None)
        packed = read(f"{module}.qweight", packing.slice_of(share.columns), rows)
        codes = packing.unpack(packed.T, share.columns)
        packed = read(f"{module}.qzeros", groups, packing.slice_of(share.rows))
        zeros = packing.unpack(packed, share.rows).int().T + self.zero_offset
        if (zeros >= 1 << self.bits).any() and self.bits == 4:
            raise InvalidRequest(f"{module}.qzeros holds more than 4 bits", param="model")
        scales = finite(read(f"{module}.scales", groups, rows).float().T, f"{module}.scales")
        numbers = Numbers(codes, zeros, scales, self.bits)
        return (
            numbers.in_order(share, group) if owners is None else numbers.in_another_order(owners)
        )


@dataclass(frozen=True, slots=True)
class PackedIntegers(Format):
    """Numbers of 2 to 8 bits as compressed-tensors packs them: neighbouring inputs in words, the
    smallest number as 0."""

    group_size: int  # inputs; -1: all
    bits: int
    symmetric: bool  # zero points are in the middle, and not stored
    in_order: bool = True  # there is no g_idx

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there are words of numbers."""
        codes = f"{module}.weight_packed"
        return codes in types and types.dtype(codes) == "I32"

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors."""
        packing, groups = Packing(self.bits), -(-columns // grouped(columns, self.group_size))
        tensors = {
            f"{module}.weight_packed": Stored((rows, packing.words(columns)), ("I32",)),
            f"{module}.weight_scale": Stored((rows, groups), FLOATS, shortened=True),
        }
        if not self.symmetric:
            zeros = Stored((packing.words(rows), groups), ("I32",))
            tensors[f"{module}.weight_zero_point"] = zeros
        if not self.in_order:
            tensors[f"{module}.weight_g_idx"] = Stored((columns,), ("I32",))
        return tensors

    def read(self, share: Share, read: Read) -> Weight:
        module, packing, rows = share.module, Packing(self.bits), slice_of(share.rows)
        group = EVERYTHING if self.group_size == -1 else self.group_size
        owners = None
        if not self.in_order:
            owners = read_owners(f"{module}.weight_g_idx", share, group, read)
        groups = slice_of(share.columns, group) if owners is None else slice(0, None)
        packed = read(f"{module}.weight_packed", rows, packing.slice_of(share.columns))
        codes = packing.unpack(packed, share.columns)
        scale = f"{module}.weight_scale"
        scales = finite(read(scale, rows, groups).float(), scale)
        zeros = torch.full_like(scales, 1 << self.bits - 1, dtype=torch.int32)
        if not self.symmetric:
            packed = read(f"{module}.weight_zero_point", packing.slice_of(share.rows), groups)
            zeros = packing.unpack(packed.T, share.rows).T.int()
        numbers = Numbers(codes, zeros, scales, self.bits)
        return (
            numbers.in_order(share, group) if owners is None else numbers.in_another_order(owners)
        )


@dataclass(frozen=True, slots=True)
class PairedIntegers(Format):
    """Signed numbers of 4 bits as ModelOpt writes AWQ: two neighbouring outputs in a byte.

    Inputs may have factors, which no layout of ours holds. A scale of all is for products in FP8,
    and is not read.
    """

    group_size: int = 1  # inputs
    whole: bool = False  # there is a scale of all
    smoothed: bool = False  # there are factors

    def format_of(self, module: str, types: Types) -> Format | None:
        """Return the format of a module, as the names and the shapes of its tensors tell."""
        if not self.holds(module, types):
            return None
        inputs, groups = types.shape(f"{module}.weight")[1], types.shape(f"{module}.{_SCALE}")[1]
        return replace(
            self,
            group_size=-(-inputs // max(1, groups)),
            whole=f"{module}.{_WHOLE}" in types,
            smoothed=f"{module}.{_FACTORS}" in types,
        )

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there are bytes for half as many outputs as have scales."""
        names = f"{module}.weight", f"{module}.{_SCALE}"
        if any(name not in types for name in names) or types.dtype(names[0]) != "U8":
            return False
        weight, scale = map(types.shape, names)
        return len(weight) == len(scale) == 2 and 2 * weight[0] == scale[0]

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Outputs must be pairs, groups what the kernels can hold."""
        if rows % 2 or self.group_size % GROUP_MULTIPLE:
            wanted = f"an even number, in groups of a multiple of {GROUP_MULTIPLE}"
            refuse_sizes(module, f"AWQ in groups of {self.group_size}", rows, columns, wanted)
        groups = -(-columns // self.group_size)
        tensors = {
            f"{module}.weight": Stored((rows // 2, columns), ("U8",)),
            f"{module}.{_SCALE}": Stored((rows, groups), (*FLOATS, "F8_E4M3")),
        }
        if self.whole:
            tensors[f"{module}.{_WHOLE}"] = Stored((1, 1), FLOATS, shortened=True)
        if self.smoothed:
            tensors[f"{module}.{_FACTORS}"] = Stored((columns,), FLOATS)
        return tensors

    def read(self, share: Share, read: Read) -> Weight:
        module, group, rows = share.module, self.group_size, slice_of(share.rows)
        pairs, groups = slice_of(share.rows, 2), slice_of(share.columns, group)
        data = read(f"{module}.weight", pairs, slice_of(share.columns))
        first = share.rows.start - 2 * pairs.start
        both = torch.stack((data & 0xF, data >> 4), dim=1).flatten(0, 1)
        codes = both[first : first + len(share.rows)] ^ 8  # of a sign and three bits
        scales = read(f"{module}.{_SCALE}", rows, groups).float()
        finite(scales, f"{module}.{_SCALE}")
        numbers = Numbers(codes, torch.full_like(scales, 8, dtype=torch.int32), scales, 4)
        if not self.smoothed:
            return numbers.in_order(share, group)
        name = f"{module}.{_FACTORS}"
        factors = finite(read(name, slice_of(share.columns), slice(0, 1)).float(), name)
        return numbers.in_another_order(blocks_of(share.columns, group)) * factors[:, 0]


@dataclass(frozen=True, slots=True)
class Int8(Format):
    """Numbers in signed bytes, with a scale, and maybe a zero point, for each group of inputs of
    an output, or for all.

    Scales of inputs are not read: inputs are multiplied as they are.
    """

    symmetric: bool
    group_size: int = -1  # inputs; -1: all
    by_row: bool = True  # outputs have scales of their own

    def holds(self, module: str, types: Types) -> bool:
        """Return whether the weight is in bytes."""
        weight = f"{module}.weight"
        return weight in types and types.dtype(weight) == "I8"

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors."""
        groups = -(-columns // grouped(columns, self.group_size))
        shape = rows if self.by_row else 1, groups
        tensors = {
            f"{module}.weight": Stored((rows, columns), ("I8",)),
            f"{module}.weight_scale": Stored(shape, FLOATS, shortened=True),
        }
        if not self.symmetric:
            tensors[f"{module}.weight_zero_point"] = Stored(shape, ("I8",), shortened=True)
        return tensors

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        module, scale = share.module, f"{share.module}.weight_scale"
        group = EVERYTHING if self.group_size == -1 else self.group_size
        rows = slice_of(share.rows) if self.by_row else slice(0, 1)
        groups = slice_of(share.columns, group)
        codes = read(f"{module}.weight", slice_of(share.rows), slice_of(share.columns))
        scales = finite(read(scale, rows, groups).float(), scale)
        zeros = torch.full_like(scales, 128, dtype=torch.int32)
        if not self.symmetric:
            zeros += read(f"{module}.weight_zero_point", rows, groups).int()
        unsigned = codes.contiguous().view(torch.uint8) ^ 0x80
        each = (zeros.expand(len(codes), -1), scales.expand(len(codes), -1))
        return Numbers(unsigned, *each, 8).in_order(share, group)


def read_owners(name: str, share: Share, group: int, read: Read) -> Tensor | None:
    """Read the group i64[K] of each input; None where each is of that of its place.

    Raises InvalidRequest for a group that does not exist.
    """
    owners = read(name, slice_of(share.columns), slice(0, 1))[:, 0].long()
    if torch.equal(owners, torch.arange(share.columns.start, share.columns.stop) // group):
        return None
    if owners.min() < 0 or owners.max() >= -(-share.inputs // group):
        raise InvalidRequest(f"{name} names groups that do not exist", param="model")
    return owners
