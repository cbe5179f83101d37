"""Speculation: what a drafter is, and which there are."""

from __future__ import annotations

from .base import Drafter, Drafts, StatefulDrafter, Target
from .registry import DRAFTERS

__all__ = ["DRAFTERS", "Drafter", "Drafts", "StatefulDrafter", "Target"]
