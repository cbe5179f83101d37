"""Storage of a weight in a quantised checkpoint: what every format tells of itself."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn, Protocol

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import E8M0_NAN, GROUP_MULTIPLE, MAX_GROUP, Rounding
from torch import Tensor

FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")  # of scales that are powers of two
EVERYTHING = 1 << 20  # more rows or columns than a matrix has


class Stored(NamedTuple):
    """A tensor that a checkpoint must hold, and the safetensors types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    shortened: bool = False  # dimensions of 1 at the end may be left out

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of a file may have this shape."""
        return self.shape == shape or (self.shortened and _short(self.shape) == _short(shape))


def _short(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the dimensions of 1 at its end."""
    length = len(shape)
    while length and shape[length - 1] == 1:
        length -= 1
    return shape[:length]


class Share(NamedTuple):
    """The part that a rank keeps of a linear weight [N, K]."""

    module: str
    rows: range  # of 0..N
    columns: range  # of 0..K
    inputs: int  # K
    dtype: str | None = None  # of the tensor that is named for the weight, if there is one


Read = Callable[[str, slice, slice], Tensor]  # part of a stored matrix, by its name
Weight = QuantizedWeight | Tensor  # f32[N, K] where no layout holds what the file does


class Types(Protocol):
    """The tensors of a checkpoint, their safetensors types and their shapes."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Quantization(ABC):
    """Formats of a checkpoint. The tensors in its files decide which modules are quantised."""

    not_converted: tuple[str, ...]  # modules listed as plain
    # Whether quantised weights and plain ones may be merged, all of them becoming plain.
    merges_with_plain: ClassVar[bool] = False
    # Names of tensors that may stand beside a quantised weight, and are not read, as a pattern:
    # scales of inputs and of caches, which are kept as they are, and shapes.
    ignored: ClassVar[tuple[str, ...]] = (
        r".+\.(?:input(?:_global)?_scale|output_scale|(?:q|k|v|kv)_scale|weight_shape)",
    )

    def lists_as_plain(self, module: str) -> bool:
        """Return whether `module` or one around it is listed, by whole parts of the dotted name:
        "mlp.gate" does not mean "mlp.gate_proj". A "*" stands for any part of a name."""
        patterns = (re.escape(name).replace(r"\*", r"[^.]*") for name in self.not_converted)
        return any(re.search(rf"\.{pattern}\.", f".{module}.") for pattern in patterns)

    @property
    @abstractmethod
    def formats(self) -> tuple[Format, ...]:
        """Formats in which modules may be held."""

    @abstractmethod
    def format_of(self, module: str, types: Types) -> Format | None:
        """Return the format in which the files hold a module; None for a plain one."""


@dataclass(frozen=True, slots=True)
class Format(Quantization):
    """Storage of a quantised weight."""

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self,)

    def format_of(self, module: str, types: Types) -> Format | None:
        return self if self.holds(module, types) else None

    @abstractmethod
    def holds(self, module: str, types: Types) -> bool:
        """Return whether the checkpoint has any tensor of the quantised form of a module."""

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return the tensors that hold a quantised weight [rows, columns], by name.

        Raises InvalidRequest if the format cannot store this size.
        """

    @abstractmethod
    def read(self, share: Share, read: Read) -> Weight:
        """Read a share. Raises InvalidRequest for one that is cut inside a group, and for NaN."""


def read_rounded(share: Share, rounding: Rounding, read: Read) -> QuantizedWeight:
    """Read a share of a plain weight and round it.

    Groups that it cuts are read whole, so that ranks round as one does. Raises InvalidRequest for
    one that is cut where groups cannot be, and for NaN.
    """
    size, blocks = group_size_of(rounding.group, share), slice_of(share.columns, rounding.group)
    first, end = blocks.start * rounding.group, blocks.stop * rounding.group
    weight = read(share.module, slice_of(share.rows), slice(first, min(end, share.inputs)))
    try:
        whole = rounding(weight)
    except ValueError as error:
        message = f"{share.module} cannot be rounded: {error}"
        raise InvalidRequest(message, param="model") from error
    return whole.regrouped(size).inputs(share.columns.start - first, len(share.columns))


def slice_of(part: range, block: int = 1) -> slice:
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


def grouped(inputs: int, size: int) -> int:
    """Return the inputs of a group; -1 stands for all."""
    return inputs if size == -1 else size


def refuse_sizes(module: str, name: str, rows: int, columns: int, wanted: str) -> NoReturn:
    """Raise InvalidRequest for a weight [rows, columns] that a format cannot store."""
    raise InvalidRequest(
        f"{module}: {name} cannot store {rows} outputs and {columns} inputs: {wanted}",
        param="model",
    )


def finite(scales: Tensor, name: str) -> Tensor:
    """Return scales. Raises InvalidRequest if one is NaN or infinite."""
    if not scales.isfinite().all():
        raise InvalidRequest(f"{name} holds NaN or infinity", param="model")
    return scales


def exponents(scales: Tensor, name: str) -> Tensor:
    """Return the exponents u8 of scales in E8M0. Raises InvalidRequest if one is NaN."""
    bits = scales.contiguous().view(torch.uint8)
    if (bits == E8M0_NAN).any():
        raise InvalidRequest(f"{name} holds NaN", param="model")
    return bits
