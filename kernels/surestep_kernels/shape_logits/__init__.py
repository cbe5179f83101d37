"""Change logits as requests ask: biases, penalties, forbidden ids and masks."""

from __future__ import annotations

from .reference import (
    Biases,
    Forbidden,
    Masks,
    Penalties,
    Positions,
    ShapeLogits,
    Shaping,
    shape_logits_reference,
)

__all__ = [
    "Biases",
    "Forbidden",
    "Masks",
    "Penalties",
    "Positions",
    "ShapeLogits",
    "Shaping",
    "shape_logits_reference",
]
