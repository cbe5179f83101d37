"""OLMo 2 and 3."""

from __future__ import annotations

from .table import OLMO

__all__ = ["OLMO"]
