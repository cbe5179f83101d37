"""Multiply gates and values that are clamped first, as gpt-oss's experts do."""

from __future__ import annotations

from .reference import ClampedSwiglu, clamped_swiglu_reference

__all__ = ["ClampedSwiglu", "clamped_swiglu_reference"]
