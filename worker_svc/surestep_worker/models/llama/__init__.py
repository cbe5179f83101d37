"""Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from .table import LLAMA

__all__ = ["LLAMA"]
