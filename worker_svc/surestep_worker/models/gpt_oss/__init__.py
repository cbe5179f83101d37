"""gpt-oss."""

from __future__ import annotations

from .table import GPT_OSS

__all__ = ["GPT_OSS"]
