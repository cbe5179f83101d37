"""Storage of a weight in each scheme of quantised checkpoints."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import GROUP_MULTIPLE, MAX_GROUP, Rounding
from torch import Tensor

FLOATS = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_FP8_NAN = 0x7F
_WORD = 8  # codes in one int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each within the word
_GPTQ_PLACES = tuple(range(_WORD))
_MOST_ZERO = 15


class Stored(NamedTuple):
    """A tensor that a checkpoint must hold, and the safetensors types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Share(NamedTuple):
    """The part that a rank keeps of a linear weight [N, K]."""

    module: str
    rows: range  # of 0..N
    columns: range  # of 0..K
    inputs: int  # K
    dtype: str | None = None  # of the tensor that is named for the weight, if there is one


Read = Callable[[str, slice, slice], Tensor]  # part of a stored matrix, by its name


class Types(Protocol):
    """The tensors of a checkpoint and their safetensors types."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Quantization(ABC):
    """The scheme of a checkpoint. The tensors in its files decide which modules use it."""

    not_converted: tuple[str, ...]  # modules listed as plain
    # Whether quantised weights and plain ones may be merged, all of them becoming plain.
    merges_with_plain: ClassVar[bool] = False

    def lists_as_plain(self, module: str) -> bool:
        """Return whether `module` or one around it is listed, by whole parts of the dotted name:
        "mlp.gate" does not mean "mlp.gate_proj". A "*" stands for any part of a name."""
        patterns = (re.escape(name).replace(r"\*", r"[^.]*") for name in self.not_converted)
        return any(re.search(rf"\.{pattern}\.", f".{module}.") for pattern in patterns)

    @abstractmethod
    def holds(self, module: str, types: Types) -> bool:
        """Return whether the checkpoint has any tensor of the quantised form of a module."""

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors that hold a quantised weight [rows, columns], by name.

        Raises InvalidRequest if the scheme cannot store this size.
        """

    @abstractmethod
    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read a share. Raises InvalidRequest for one that is cut inside a group, and for NaN."""


@dataclass(frozen=True, slots=True)
class Fp8(Quantization):
    """E4M3 weights with a scale per block of rows and columns.

    Blocks are squares as DeepSeek and Qwen publish them, or whole rows, the "channels" of
    compressed-tensors. Every row gets a copy of its block's scales, so that weights may be merged
    and cut anywhere between rows.
    """

    block: tuple[int, int]  # rows, columns
    scale: str = "weight_scale_inv"  # name of the scales, which multiply in spite of "inv"

    def holds(self, module: str, types: Types) -> bool:
        """Return whether there is a scale, or a weight that needs one."""
        weight, scale = f"{module}.weight", f"{module}.{self.scale}"
        return scale in types or (weight in types and types.dtype(weight) == _FP8)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Blocks at the lower and right borders may be smaller."""
        blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
        return {
            f"{module}.weight": Stored((rows, columns), (_FP8,)),
            f"{module}.{self.scale}": Stored(blocks, FLOATS),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        module, (height, width) = share.module, self.block
        group_size = group_size_of(width, share)
        codes = read(f"{module}.weight", _slice(share.rows), _slice(share.columns)).contiguous()
        if (codes.view(torch.uint8) & _FP8_NAN == _FP8_NAN).any():
            raise InvalidRequest(f"{module}.weight holds NaN", param="model")
        rows, columns = _slice(share.rows, height), _slice(share.columns, width)
        blocks = read(f"{module}.{self.scale}", rows, columns).float()
        by_row = blocks[blocks_of(share.rows, height)]
        scales = by_row[:, blocks_of(share.columns, width, group_size)].contiguous()
        return QuantizedWeight(codes, scales, None, group_size)


@dataclass(frozen=True, slots=True)
class Awq(Quantization):
    """4-bit weights, a scale and a zero point per output and group of inputs (Lin et al., 2024).

    Stored as AutoAWQ's "gemm": transposed, the codes of eight neighbouring outputs in one int32.
    """

    group_size: int  # inputs; -1: all

    def holds(self, module: str, types: Types) -> bool:
        """Return whether any of the tensors is present; unquantised modules have none of them."""
        return any(f"{module}.{name}" in types for name in ("qweight", "qzeros", "scales"))

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Groups and words must be full."""
        group = _inputs(self.group_size, columns)
        if rows % _WORD or columns % group:
            raise InvalidRequest(
                f"{module}: AWQ cannot store {rows} outputs, which are not a multiple of {_WORD}, "
                f"or {columns} inputs, which are not a multiple of the group size {group}",
                param="model",
            )
        words, groups = rows // _WORD, columns // group
        return {
            f"{module}.qweight": Stored((columns, words), ("I32",)),
            f"{module}.qzeros": Stored((groups, words), ("I32",)),
            f"{module}.scales": Stored((groups, rows), ("F16", "BF16")),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        module, group = share.module, _inputs(self.group_size, share.inputs)
        group_size = group_size_of(group, share)
        words, groups = _slice(share.rows, _WORD), _slice(share.columns, group)
        first = share.rows.start - words.start * _WORD
        rows = slice(first, first + len(share.rows))
        owners = blocks_of(share.columns, group, group_size)
        codes = (
            _unpack(read(f"{module}.qweight", _slice(share.columns), words), _AWQ_PLACES)
            .T[rows]
            .contiguous()
        )
        zeros = (
            _unpack(read(f"{module}.qzeros", groups, words), _AWQ_PLACES)
            .T[rows, owners]
            .contiguous()
        )
        scales = (
            read(f"{module}.scales", groups, _slice(share.rows)).float().T[:, owners].contiguous()
        )
        return QuantizedWeight(codes, scales, zeros, group_size)


@dataclass(frozen=True, slots=True)
class Gptq(Quantization):
    """4-bit weights, a scale and a zero per output and group of inputs (Frantar et al., 2023).

    Stored transposed: the codes of eight neighbouring inputs in one int32, and the zero points of
    eight neighbouring outputs.
    """

    group_size: int  # inputs; -1: all
    zero_offset: int  # of AutoGPTQ's first format, which stores zero points minus 1

    def holds(self, module: str, types: Types) -> bool:
        """Return whether any of the tensors is present; unquantised modules have none of them."""
        return any(f"{module}.{name}" in types for name in ("qweight", "qzeros", "scales"))

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors. Groups and words must be full. Without desc_act, g_idx adds no
        information."""
        group = _inputs(self.group_size, columns)
        if rows % _WORD or columns % _WORD or columns % group:
            raise InvalidRequest(
                f"{module}: GPTQ cannot store {rows} outputs or {columns} inputs, which are not "
                f"multiples of {_WORD}, or groups of {group} that do not divide the latter",
                param="model",
            )
        groups = columns // group
        return {
            f"{module}.qweight": Stored((columns // _WORD, rows), ("I32",)),
            f"{module}.qzeros": Stored((groups, rows // _WORD), ("I32",)),
            f"{module}.scales": Stored((groups, rows), ("F16", "BF16")),
            f"{module}.g_idx": Stored((columns,), ("I32",)),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read a share. Also raises InvalidRequest for zero points that do not fit into 4 bits."""
        module, group = share.module, _inputs(self.group_size, share.inputs)
        group_size = group_size_of(group, share)
        rows, words = _slice(share.rows), _slice(share.rows, _WORD)
        groups, owners = _slice(share.columns, group), blocks_of(share.columns, group, group_size)
        packed = read(f"{module}.qweight", _slice(share.columns, _WORD), rows)
        codes = _unpack(packed.T, _GPTQ_PLACES)[:, : len(share.columns)].contiguous()
        first = share.rows.start - words.start * _WORD
        zeros = _unpack(read(f"{module}.qzeros", groups, words), _GPTQ_PLACES) + self.zero_offset
        zeros = zeros.T[first : first + len(share.rows), owners].contiguous()
        if (zeros > _MOST_ZERO).any():
            raise InvalidRequest(f"{module}.qzeros holds more than 4 bits", param="model")
        scales = read(f"{module}.scales", groups, rows).float().T[:, owners].contiguous()
        return QuantizedWeight(codes, scales, zeros, group_size)


def read_rounded(share: Share, rounding: Rounding, read: Read) -> QuantizedWeight:
    """Read a share of a plain weight and round it.

    Groups that it cuts are read whole, so that ranks round as one does. Raises InvalidRequest for
    one that is cut where groups cannot be, and for NaN.
    """
    size, blocks = group_size_of(rounding.group, share), _slice(share.columns, rounding.group)
    first, end = blocks.start * rounding.group, blocks.stop * rounding.group
    weight = read(share.module, _slice(share.rows), slice(first, min(end, share.inputs)))
    try:
        whole = rounding(weight)
    except ValueError as error:
        message = f"{share.module} cannot be rounded: {error}"
        raise InvalidRequest(message, param="model") from error
    return whole.regrouped(size).inputs(share.columns.start - first, len(share.columns))


def _slice(part: range, block: int = 1) -> slice:
    """Return the blocks that contain a part, as a slice of all blocks."""
    return slice(part.start // block, -(-part.stop // block))


def blocks_of(part: range, block: int, step: int = 1) -> Tensor:
    """Return the block of each element, or of each group of `step` elements; i64."""
    return torch.arange(part.start, part.stop, step) // block - part.start // block


def group_size_of(stored: int, share: Share) -> int:
    """Return the largest group size that fits both the start of the share and the stored groups."""
    size = math.gcd(stored, share.columns.start, MAX_GROUP)
    if size % GROUP_MULTIPLE == 0:
        return size
    raise InvalidRequest(
        f"{share.module}: inputs {share.columns.start} to {share.columns.stop} of {share.inputs} "
        f"cut groups of {stored} where parts are not multiples of {GROUP_MULTIPLE}",
        param="tensor_parallel_size",
    )


def _unpack(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return codes u8[R, 8 * W] of words i32[R, W]."""
    codes = [(words >> 4 * place & 0xF).to(torch.uint8) for place in places]
    return torch.stack(codes, dim=-1).flatten(1)


def _inputs(group_size: int, inputs: int) -> int:
    """Return the inputs of a group; -1 stands for all."""
    return inputs if group_size == -1 else group_size
