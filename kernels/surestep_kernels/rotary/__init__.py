"""Rotate queries and keys to their positions, in place."""

from __future__ import annotations

from .reference import Rotary, Sections, rotary_reference, section_axes

__all__ = ["Rotary", "Sections", "rotary_reference", "section_axes"]
