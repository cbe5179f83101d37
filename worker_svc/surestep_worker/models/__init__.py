"""Models by the architecture name of their config.json."""

from __future__ import annotations

from .config import ModelConfig
from .loader import MODELS, Model, load_model

__all__ = ["MODELS", "Model", "ModelConfig", "load_model"]
