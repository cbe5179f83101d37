"""Numeric ops of the worker: a torch reference for each, and faster implementations of it."""

from __future__ import annotations

from .attention_case import AttentionCase
from .dispatch import load_kernels
from .kernel_set import KernelSet
from .linear import PackedLinear
from .quantized import QuantizedWeight

__all__ = ["AttentionCase", "KernelSet", "PackedLinear", "QuantizedWeight", "load_kernels"]
