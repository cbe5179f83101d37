"""Divide rows by their root mean square; with a residual, add to it first."""

from __future__ import annotations

from .reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["add_rms_norm_reference", "rms_norm_reference"]
