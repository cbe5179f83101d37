"""Add what adapters of low rank make of a product's inputs to its outputs."""

from __future__ import annotations

from .reference import AdapterWeights, AddAdapters, add_adapters_reference

__all__ = ["AdapterWeights", "AddAdapters", "add_adapters_reference"]
