"""Models by the architecture name of their config.json."""

from __future__ import annotations

from .config import ModelConfig
from .loader import MODELS, LoadOptions, Model, attention_case, load_model
from .source import ModelSource, check_alike

__all__ = [
    "MODELS",
    "LoadOptions",
    "Model",
    "ModelConfig",
    "ModelSource",
    "attention_case",
    "check_alike",
    "load_model",
]
