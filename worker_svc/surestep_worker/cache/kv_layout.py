"""Place of each layer of a model in the blocks of the KV cache.

Layers that see the same positions are put into groups of about the same number of layers. A block
belongs to one group at a time and holds a page of each of its layers; layer n of every group lies
in the same memory. So blocks of one size serve all groups, and what one has no use for, another
may have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from surestep_common.kv_groups import ALL


class Place(NamedTuple):
    """Where a layer lies."""

    group: int
    layer: int  # of a block


class KVLayout(NamedTuple):
    """Groups of layers, those that see all positions first."""

    windows: tuple[int, ...]  # by group: positions that a token sees, ALL or with itself
    places: tuple[Place, ...]  # by layer, those of a draft head last
    num_layers: int  # of a block that are for the model's layers; behind them are a draft head's

    @classmethod
    def of(cls, windows: Sequence[int], num_draft_layers: int, *, keeps_hidden: bool) -> KVLayout:
        """Lay out layers with these `windows`, and those of a draft head.

        What a draft head reads and writes is kept for all positions, in group 0, since it may have
        any number of them to catch up with. Where no layer of the model sees them all, windows
        would save nothing then.
        """
        by_window = defaultdict[int, list[int]](list)
        needs_all = (keeps_hidden or num_draft_layers > 0) and ALL not in windows
        for layer, window in enumerate(windows):
            by_window[ALL if needs_all else window].append(layer)
        least = min(map(len, by_window.values()), default=1)
        groups, places = list[int](), [Place(0, 0)] * len(windows)
        for window, layers in sorted(by_window.items()):
            num_groups = max(1, round(len(layers) / least))
            for i, layer in enumerate(layers):
                places[layer] = Place(len(groups) + i % num_groups, i // num_groups)
            groups += [window] * num_groups
        num_layers = max((place.layer + 1 for place in places), default=0)
        drafting = (Place(0, num_layers + i) for i in range(num_draft_layers))
        return cls(tuple(groups) or (ALL,), (*places, *drafting), num_layers)
