"""Attend to latents: one vector of each position, which all heads read."""

from __future__ import annotations

from .reference import Attend, attend_reference, read_latents, store_latents, tokens_of

__all__ = ["Attend", "attend_reference", "read_latents", "store_latents", "tokens_of"]
