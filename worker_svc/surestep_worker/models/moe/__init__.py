"""Qwen2-MoE, Qwen3-MoE and Mixtral."""

from __future__ import annotations

from .table import SPARSE

__all__ = ["SPARSE"]
