"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from .table import PHI3

__all__ = ["PHI3"]
