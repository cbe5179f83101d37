"""Products in C with weights that are packed for streaming."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library

from .quantized import QuantizedWeight
from .reference import FP16_HEADERS, PLAIN_FORMATS, PackedLinear


def load(library: Library) -> dict[str, CFunction]:
    """Return the ops of this folder."""
    run = library.long("linear", "4P 4l 3i")
    pack = library.long("pack_linear", "2P 2l i")
    pack_codes = library.long("pack_quantized", "5P 3l i")
    packed_bytes = library.long("packed_bytes", "3l i", "l")
    panel_width = library.long("panel_width", "", "i")
    return {
        "pack_linear": partial(pack_linear, pack, panel_width),
        "pack_quantized": partial(pack_quantized, pack_codes, packed_bytes, panel_width),
        "linear": partial(linear, run),
    }


def pack_linear(
    pack: CFunction, panel_width: Callable[[], int], weight: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    """Pack weight [N, K] into panels of columns for streaming (layout: cpu.c)."""
    rows, columns = weight.shape
    panel, format_ = panel_width(), PLAIN_FORMATS[weight.dtype]
    padded = -(-rows // panel) * panel
    data = weight.new_empty(padded * (columns + columns % 2))
    source = weight.contiguous()
    pack(data.data_ptr(), source.data_ptr(), rows, columns, format_)
    return PackedLinear(data, _padded(bias, rows, panel), columns, rows, format_)


def pack_quantized(
    pack: CFunction,
    packed_bytes: Callable[[int, int, int, int], int],
    panel_width: Callable[[], int],
    weight: QuantizedWeight,
    bias: Tensor | None = None,
) -> PackedLinear:
    """Pack codes and scales into panels in one stream (layout: quantized.c)."""
    rows, columns = weight.codes.shape
    group_size, format_ = weight.group_size, weight.format
    scales, mins = weight.scales, weight.mins
    if mins is not None and format_ in FP16_HEADERS:
        scales, mins = scales.half(), mins.half()
    data = torch.empty(packed_bytes(rows, columns, group_size, format_), dtype=torch.uint8)
    parts = data, weight.codes, scales, weight.zeros, mins
    pointers = (None if part is None else part.data_ptr() for part in parts)
    pack(*pointers, rows, columns, group_size, format_)
    bias = _padded(bias, rows, panel_width())
    return PackedLinear(data, bias, columns, rows, format_, group_size)


def _padded(bias: Tensor | None, rows: int, panel: int) -> Tensor | None:
    return None if bias is None else functional.pad(bias.float(), (0, -rows % panel))


def linear(
    run: CFunction, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Sum in fp32 and round once, to out_dtype; otherwise as linear_reference."""
    rows, columns = x.shape
    data, width = packed.data, packed.out_features
    assert x.is_contiguous()
    assert x.dtype is data.dtype or packed.group_size
    assert columns == packed.in_features
    if out_dtype is None:
        out = x.new_empty(rows, width)
    else:
        out = x.new_empty(rows, width, dtype=out_dtype)
    bias = None if packed.bias is None else packed.bias.data_ptr()
    kinds = packed.group_size, packed.format, DTYPE_CODES[x.dtype], DTYPE_CODES[out.dtype]
    pointers = out.data_ptr(), x.data_ptr(), data.data_ptr(), bias
    run(*pointers, rows, width, columns, *kinds)
    return out
