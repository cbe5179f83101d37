"""Weights of the published gpt-oss checkpoints, in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import E8M0_NAN, MXFP4_GROUP
from torch import Tensor

from .schemes import Quantization, Read, Share, Stored, Types

_BLOCK_BYTES = MXFP4_GROUP // 2
_NAMES = "blocks", "scales"


@dataclass(frozen=True, slots=True)
class Mxfp4(Quantization):
    """E2M1 weights, a power of two for every 32 inputs (OCP Microscaling Formats 1.0).

    A byte holds two neighbouring inputs, the first in its low half.
    """

    def holds(self, module: str, types: Types) -> bool:
        """Look for either tensor; plain modules have none of them."""
        return any(f"{module}_{name}" in types for name in _NAMES)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Return both tensors. Blocks must be full."""
        if columns % MXFP4_GROUP:
            raise InvalidRequest(
                f"{module}: MXFP4 cannot store {columns} inputs, which are not a multiple of"
                f" {MXFP4_GROUP}",
                param="model",
            )
        blocks = columns // MXFP4_GROUP
        return {
            f"{module}_blocks": Stored((rows, blocks, _BLOCK_BYTES), ("U8",)),
            f"{module}_scales": Stored((rows, blocks), ("U8",)),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Read whole blocks of inputs. Raise InvalidRequest for a cut inside one, and for NaN."""
        module, rows, columns = share.module, share.rows, share.columns
        if columns.start % MXFP4_GROUP or columns.stop % MXFP4_GROUP:
            raise InvalidRequest(
                f"{module}: inputs {columns.start} to {columns.stop} of {share.inputs} cut blocks"
                f" of {MXFP4_GROUP}",
                param="tensor_parallel_size",
            )
        place = (
            slice(rows.start, rows.stop),
            slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP),
        )
        scales = read(f"{module}_scales", *place).contiguous()
        if (scales == E8M0_NAN).any():
            raise InvalidRequest(f"{module}_scales holds NaN", param="model")
        codes = _unpack(read(f"{module}_blocks", *place)).view(len(rows), len(columns))
        return QuantizedWeight(codes, scales, None, MXFP4_GROUP)


def _unpack(blocks: Tensor) -> Tensor:
    """Return codes u8[.., 32] of blocks u8[.., 16]: each byte becomes the two of a 16-bit word."""
    words = blocks.contiguous().short()
    words |= words << 4
    words &= 0x0F0F
    return words.view(torch.uint8)
