"""Drafters, which guess the next tokens of running requests."""

from __future__ import annotations

from surestep_worker.drafters.base import (
    DeviceDrafter,
    DraftContext,
    Drafter,
    Drafts,
)
from surestep_worker.drafters.registry import DRAFTERS

__all__ = [
    "DRAFTERS",
    "DeviceDrafter",
    "DraftContext",
    "Drafter",
    "Drafts",
]
