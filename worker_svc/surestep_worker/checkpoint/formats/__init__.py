"""Formats of quantised checkpoints: each reads its tensors into a layout of the kernels."""

from __future__ import annotations

from .format import FLOATS, Format, Quantization, Share, Stored, read_rounded
from .fp4 import Mxfp4Blocks, Mxfp4Packed, Nvfp4
from .fp8 import Fp8
from .gguf import Gguf
from .integers import Awq, Gptq, Int8, PackedIntegers
from .mixed import Mixed, targeted

__all__ = [
    "FLOATS",
    "Awq",
    "Format",
    "Fp8",
    "Gguf",
    "Gptq",
    "Int8",
    "Mixed",
    "Mxfp4Blocks",
    "Mxfp4Packed",
    "Nvfp4",
    "PackedIntegers",
    "Quantization",
    "Share",
    "Stored",
    "read_rounded",
    "targeted",
]
