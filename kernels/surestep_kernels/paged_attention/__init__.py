"""Attend to the keys and values in the pages of a cache, by one of several backends."""

from __future__ import annotations

from .case import AttentionBackend, AttentionCase, refuse_int8
from .reference import AttentionRows, PagedAttention, paged_attention_reference

__all__ = [
    "AttentionBackend",
    "AttentionCase",
    "AttentionRows",
    "PagedAttention",
    "paged_attention_reference",
    "refuse_int8",
]
