"""Add up all bits of a step's hidden states."""

from __future__ import annotations

from .reference import Fingerprint, fingerprint_reference, row_fingerprints

__all__ = ["Fingerprint", "fingerprint_reference", "row_fingerprints"]
