"""Multiply by packed weights, plain or quantised, and pack them.

`reference.py` has the product, `quantized.py` and `rounding.py` the weights' formats, and
`fp8_rows.py` inputs that are rounded to FP8.
"""

from __future__ import annotations

from .fp8_rows import quantize_rows, round_rows, with_rounded_rows
from .quantized import (
    E8M0_NAN,
    GROUP_MULTIPLE,
    MAX_GROUP,
    MXFP4_GROUP,
    PackQuantized,
    QuantizedWeight,
    alike,
    concatenate,
    pack_quantized_reference,
)
from .reference import (
    FP16_HEADERS,
    PLAIN_FORMATS,
    Linear,
    PackedHeads,
    PackedLinear,
    PackLinear,
    PlainProducts,
    WeightFormat,
    dequantize,
    e8m0,
    linear_reference,
    pack_linear_reference,
)
from .rounding import FP8, GROUP, INT4, INT8, ROUNDINGS, Rounding, rounded

__all__ = [
    "E8M0_NAN",
    "FP8",
    "FP16_HEADERS",
    "GROUP",
    "GROUP_MULTIPLE",
    "INT4",
    "INT8",
    "MAX_GROUP",
    "MXFP4_GROUP",
    "PLAIN_FORMATS",
    "ROUNDINGS",
    "Linear",
    "PackLinear",
    "PackQuantized",
    "PackedHeads",
    "PackedLinear",
    "PlainProducts",
    "QuantizedWeight",
    "Rounding",
    "WeightFormat",
    "alike",
    "concatenate",
    "dequantize",
    "e8m0",
    "linear_reference",
    "pack_linear_reference",
    "pack_quantized_reference",
    "quantize_rows",
    "round_rows",
    "rounded",
    "with_rounded_rows",
]
