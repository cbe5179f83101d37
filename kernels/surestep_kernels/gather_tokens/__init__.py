"""Gather tokens from the slots, with their positions and places in the cache."""

from __future__ import annotations

from .reference import GatherTokens, TokenInputs, TokenRuns, gather_tokens_reference

__all__ = ["GatherTokens", "TokenInputs", "TokenRuns", "gather_tokens_reference"]
