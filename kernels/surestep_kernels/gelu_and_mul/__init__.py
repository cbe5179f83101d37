"""Multiply the gelu of a row's first half, approximated by tanh, by its second half."""

from __future__ import annotations

from .reference import gelu_and_mul_reference

__all__ = ["gelu_and_mul_reference"]
