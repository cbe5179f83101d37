"""Normalise groups of a row and multiply them by the silu of their gates."""

from __future__ import annotations

from .reference import rms_norm_gated_reference

__all__ = ["rms_norm_gated_reference"]
