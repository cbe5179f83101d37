"""Project to heads, normalise and rotate them, and store keys and values, in one op."""

from __future__ import annotations

from .reference import HeadProjection

__all__ = ["HeadProjection"]
