"""Models by the architecture name of their config.json."""

from __future__ import annotations

from surestep_worker.configs.model_config import ModelConfig

from .families import FAMILIES
from .loader import LoadOptions, Model, attention_case, load_model
from .source import ModelSource, check_alike

__all__ = [
    "FAMILIES",
    "LoadOptions",
    "Model",
    "ModelConfig",
    "ModelSource",
    "attention_case",
    "check_alike",
    "load_model",
]
