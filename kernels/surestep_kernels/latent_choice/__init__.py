"""Choose the positions that a token attends to in latent attention."""

from __future__ import annotations

from .reference import LatentChoice, latent_choice_reference

__all__ = ["LatentChoice", "latent_choice_reference"]
