"""Numeric ops of the worker: a torch reference for each, and faster implementations."""

from __future__ import annotations

from .dispatch import attention_for, load_kernels
from .linear import PackedLinear, QuantizedWeight
from .paged_attention import AttentionCase
from .table import KernelSet

__all__ = [
    "AttentionCase",
    "KernelSet",
    "PackedLinear",
    "QuantizedWeight",
    "attention_for",
    "load_kernels",
]
