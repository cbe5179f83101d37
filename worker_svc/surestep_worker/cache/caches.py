"""The caches of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from .held_caches import HeldCaches
from .kv_cache import KVCache
from .recurrent import DraftStates, RecurrentCache


@dataclass(frozen=True, slots=True)
class Caches:
    """Caches that a model reads and writes in a forward pass."""

    kv: KVCache
    recurrent: RecurrentCache | None = None  # None: the model has no recurrent layers
    held: HeldCaches | None = None  # None: they end with the process
    draft: DraftStates | None = None  # None: what drafts has no recurrent layers
