"""Draft what followed the last tokens where they stood before: prompt lookup."""

from __future__ import annotations

from .reference import Ngram, NgramDrafts, RecentTexts, ngram_reference

__all__ = ["Ngram", "NgramDrafts", "RecentTexts", "ngram_reference"]
