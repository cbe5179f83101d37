"""DeepSeek-V3 and GLM: latent attention, experts chosen by sigmoid scores."""

from __future__ import annotations

from .table import DEEPSEEK

__all__ = ["DEEPSEEK"]
