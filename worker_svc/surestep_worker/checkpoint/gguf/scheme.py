"""How GGUF files store weights: blocks of several types, often more than one in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight

from surestep_worker.checkpoint.schemes import (
    Quantization,
    Read,
    Share,
    Stored,
    Types,
    blocks_of,
    group_size_of,
)

from .blocks import UNPACKING
from .reading import PACKED, block_size


@dataclass(frozen=True, slots=True)
class Gguf(Quantization):
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
        unpacking, block = UNPACKING[share.dtype], block_size(share.dtype)
        group_size = group_size_of(unpacking.group_size, share)
        first = share.columns.start // block * block
        whole = slice(first, -(-share.columns.stop // block) * block)
        rows = slice(share.rows.start, share.rows.stop)
        groups = unpacking(read(f"{share.module}.weight", rows, whole))
        inner = range(share.columns.start - first, share.columns.stop - first)
        owners = blocks_of(inner, unpacking.group_size, group_size)
        owners += inner.start // unpacking.group_size
        scales, mins = groups.scales[:, owners], groups.mins[:, owners]
        if not (scales.isfinite().all() and mins.isfinite().all()):
            raise InvalidRequest(f"{share.module}.weight holds NaN or infinity", param="model")
        codes = groups.codes[:, inner.start : inner.stop].contiguous()
        return QuantizedWeight(codes, scales, None, group_size, mins, unpacking.bits)
