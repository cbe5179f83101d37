"""Formats of quantised checkpoints: each reads its tensors into a layout of the kernels."""

from __future__ import annotations

from .format import FLOATS, Format, Quantization, Share, Stored, read_rounded
from .fp8 import Fp8, ModelOptFp8, Mxfp8
from .gguf import Gguf
from .integers import Awq, Gptq, Int8, PackedIntegers, PairedIntegers
from .mixed import Mixed, targeted
from .small_floats import Mxfp4Blocks, Mxfp4Packed, Mxfp6, Nvfp4

__all__ = [
    "FLOATS",
    "Awq",
    "Format",
    "Fp8",
    "Gguf",
    "Gptq",
    "Int8",
    "Mixed",
    "ModelOptFp8",
    "Mxfp4Blocks",
    "Mxfp4Packed",
    "Mxfp6",
    "Mxfp8",
    "Nvfp4",
    "PackedIntegers",
    "PairedIntegers",
    "Quantization",
    "Share",
    "Stored",
    "read_rounded",
    "targeted",
]
