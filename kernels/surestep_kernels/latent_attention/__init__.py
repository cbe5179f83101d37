"""Attend to latents: one vector of each position, which all heads read."""

from __future__ import annotations

from .reference import LATENT_REFERENCE, LatentOps, choose_reference, store_latents

__all__ = ["LATENT_REFERENCE", "LatentOps", "choose_reference", "store_latents"]
