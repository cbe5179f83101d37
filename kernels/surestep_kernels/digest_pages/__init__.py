"""Digest pages, so that a later process can tell whether they are whole."""

from __future__ import annotations

from .reference import DigestPages, digest_pages_reference

__all__ = ["DigestPages", "digest_pages_reference"]
