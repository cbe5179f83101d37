"""Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM3 and MiMo."""

from __future__ import annotations

from .table import LLAMA, MIMO

__all__ = ["LLAMA", "MIMO"]
