"""Gemma 1, 2 and 3."""

from __future__ import annotations

from .table import GEMMA

__all__ = ["GEMMA"]
