"""Any decoder that transformers has: its own forward pass, over our attention, products and caches.

What is computed by which module in which order is theirs; every product with a weight, attention,
routed experts, norms and rotary tables are ours, since a row of theirs may depend on its company.
"""

from __future__ import annotations

from .model import TRANSFORMERS, WITH_HEADS

__all__ = ["TRANSFORMERS", "WITH_HEADS"]
