"""Models by the architecture name of their config.json."""

from __future__ import annotations

from surestep_worker.configs.model_config import ModelConfig
from surestep_worker.layers.draft_head import DraftHead

from .draft_loader import HEAD_KINDS, LOADERS, DraftRank, DraftSource, Load, load_draft_model
from .families import FAMILIES
from .loader import LoadOptions, Model, attention_case, load_model
from .source import ModelSource, check_alike, gather_fingerprints

__all__ = [
    "FAMILIES",
    "HEAD_KINDS",
    "LOADERS",
    "DraftHead",
    "DraftRank",
    "DraftSource",
    "Load",
    "LoadOptions",
    "Model",
    "ModelConfig",
    "ModelSource",
    "attention_case",
    "check_alike",
    "gather_fingerprints",
    "load_draft_model",
    "load_model",
]
