"""Llama, Mistral, Ministral, Qwen2, Qwen3 and SmolLM3."""

from __future__ import annotations

from .table import LLAMA

__all__ = ["LLAMA"]
