"""A quantised product whose splits one program adds up, beside the launcher that parts them."""

from __future__ import annotations

import torch
from surestep_kernels import PackedLinear
from surestep_kernels.linear import triton as ops
from surestep_kernels.linear.triton_fp8_rows import Factor
from torch import Tensor


def product_together(x: Tensor, packed: PackedLinear, columns: int, per_split: int) -> Tensor:
    """Return f32[T, N] of x [T, K], with tiles of so many columns and so many groups in a split."""
    tiles = ops.choose_tiles(len(x), packed, x.dtype, ops.ONE_WIDTH)
    out = torch.empty(len(x), packed.out_features, device=x.device)
    one, factor = tiles._replace(apart=False, columns=columns), Factor(x, None)
    ops._launch(out, packed.bias, one, x=factor, packed=packed, per_split=per_split)
    return out
