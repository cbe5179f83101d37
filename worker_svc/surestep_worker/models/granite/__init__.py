"""Granite 3."""

from __future__ import annotations

from .table import GRANITE

__all__ = ["GRANITE"]
