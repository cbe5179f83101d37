"""Multiply the silu of a row's first half by its second half."""

from __future__ import annotations

from .reference import silu_and_mul_reference

__all__ = ["silu_and_mul_reference"]
