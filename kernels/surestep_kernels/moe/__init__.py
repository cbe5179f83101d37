"""Add what each token's experts make of it."""

from __future__ import annotations

from .reference import (
    ExpertAdapters,
    Mixture,
    Moe,
    PackedExperts,
    PackExperts,
    Router,
    moe_reference,
    pack_experts_reference,
)

__all__ = [
    "ExpertAdapters",
    "Mixture",
    "Moe",
    "PackExperts",
    "PackedExperts",
    "Router",
    "moe_reference",
    "pack_experts_reference",
]
