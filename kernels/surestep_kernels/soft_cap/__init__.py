"""Keep logits within a bound by tanh."""

from __future__ import annotations

from .reference import SoftCap, soft_cap_reference

__all__ = ["SoftCap", "soft_cap_reference"]
