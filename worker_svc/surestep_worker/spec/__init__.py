"""Speculation: what a drafter is, and which there are."""

from __future__ import annotations

from .base import DeviceDrafter, Drafter, Drafts, KeepsState, StatefulDrafter, Target
from .registry import DRAFTERS

__all__ = [
    "DRAFTERS",
    "DeviceDrafter",
    "Drafter",
    "Drafts",
    "KeepsState",
    "StatefulDrafter",
    "Target",
]
