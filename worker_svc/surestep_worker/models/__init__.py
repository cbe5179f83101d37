"""Models by the architecture name of their config.json."""

from __future__ import annotations

from .config import ModelConfig
from .loader import MODELS, LoadOptions, Model, attention_case, load_model

__all__ = ["MODELS", "LoadOptions", "Model", "ModelConfig", "attention_case", "load_model"]
