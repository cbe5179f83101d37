"""Numeric ops of the worker: a torch reference for each, and faster implementations."""

from __future__ import annotations

from surestep_kernels.mixers.attention_case import AttentionCase
from surestep_kernels.ops.linear import PackedLinear
from surestep_kernels.ops.quantized import QuantizedWeight

from .dispatch import load_kernels
from .kernel_set import KernelSet

__all__ = ["AttentionCase", "KernelSet", "PackedLinear", "QuantizedWeight", "load_kernels"]
