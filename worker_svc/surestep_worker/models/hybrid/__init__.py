"""Qwen3-Next and Qwen3.5: gated delta rule beside attention."""

from __future__ import annotations

from .table import HYBRID

__all__ = ["HYBRID"]
