"""The paged key/value cache of one rank, and which layer of a model lies where in its blocks.

Layers that see the same positions are put into groups of about the same number of layers. A block
belongs to one group at a time and holds a page of each of its layers; layer n of every group lies
in the same memory. So blocks of one size serve all groups, and what one has no use for, another
may have.
"""

from __future__ import annotations

import copy
import math
import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import NULL_BLOCK
from surestep_common.kv_groups import ALL
from surestep_kernels import KernelSet
from surestep_kernels.store_kv import FP8, INT8, LayerCache, with_scales
from torch import Tensor

from .cache_memory import CacheMemory


def cache_pages(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, memory: CacheMemory | None
) -> Tensor:
    """Return the next pages of the memory that outlives the process, or zeros where none does."""
    return zero_pages(shape, dtype, device) if memory is None else memory.tensor(shape, dtype)


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros, on the CPU as untouched pages of the system, which are free until used.

    Filling gigabytes would be the largest part of a worker's recovery. An allocator of C would do
    that: what it takes for one of some threads it clears, up to 32 MB.
    """
    if device != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


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


T = TypeVar("T")

# By the setting `kv_cache_dtype`. None: the model's.
CACHE_DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "int8": INT8,
    "int8_per_token_head": INT8,
}


class KVHeads(NamedTuple):
    """Keys, and as many values, that a layer of the cache keeps of a token."""

    num_heads: int  # of this rank
    head_dim: int


class LatentWidths(NamedTuple):
    """Widths of a token in a layer with latent attention, the same on every rank: a latent, in the
    place of keys, and an index key, in that of values."""

    latent: int
    index_key: int  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Contents of a model's cache on this rank."""

    windows: tuple[int, ...]  # of the model's layers: positions that a token sees, 0 = all
    num_kv_heads: int  # of this rank
    head_dim: int
    block_size: int  # tokens
    dtype: torch.dtype  # of the model, and of the hidden states kept
    cache_dtype: torch.dtype | None = None  # of keys and values; None: the model's
    # Width of the hidden state kept for every position, the input of a drafter; 0 = none are kept.
    kept_hidden: int = 0
    # Behind the model's: of a draft head from elsewhere.
    draft_layers: tuple[KVHeads | LatentWidths, ...] = ()
    latents: tuple[LatentWidths, ...] = ()  # of the model's layers, if they have these
    inner_draft_layers: int = 0  # of the model's layers, the last: those of a draft head in it
    # By layer of the model, what keys and values are divided by in pages in FP8; others: 1, 1.
    scales: tuple[tuple[float, float], ...] = ()

    @property
    def scaled(self) -> bool:
        """Return whether its pages are divided by `scales`."""
        return bool(self.scales) and self.page_dtype is FP8 and not self.latents

    @property
    def page_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def layout(self) -> KVLayout:
        return KVLayout.of(self.windows, len(self.draft_layers), keeps_hidden=self.kept_hidden > 0)

    @property
    def layers(self) -> tuple[KVHeads | LatentWidths, ...]:
        """Layers with pages in a block: layers of each group, then those of a draft head."""
        own = KVHeads(self.num_kv_heads, self.head_dim)
        return (self.latents or (own,) * self.layout.num_layers) + self.draft_layers

    @property
    def drafting(self) -> set[int]:
        """Layers of a block, of the first group, that a draft head writes."""
        layout, first = self.layout, len(self.windows) - self.inner_draft_layers
        return {place.layer for place in layout.places[first:] if place.group == 0}


class KVCache:
    """Key and value pages of every layer of a block, NULL_BLOCK included, which no slot owns."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        kernels: KernelSet,
        device: str,
        memory: CacheMemory | None = None,
    ) -> None:
        assert num_blocks > NULL_BLOCK + 1, "no block besides the null block"
        self.spec = spec
        self.num_blocks = num_blocks
        self.layout = spec.layout
        self.layers = [
            LayerCache(*(cache_pages(shape, spec.page_dtype, device, memory) for shape in shapes))
            for shapes in _shapes(spec, num_blocks, kernels)
        ]
        self._by_layer = [self.layers[place.layer] for place in self.layout.places]
        for number, scales in enumerate(spec.scales if spec.scaled else ()):
            of_layer = torch.tensor(scales, device=device)
            self._by_layer[number] = self._by_layer[number]._replace(scales=of_layer)
        hidden = (num_blocks * spec.block_size, spec.kept_hidden)
        # By flat slot, as kv_slots of group 0 name them.
        self.hidden = cache_pages(hidden, spec.dtype, device, memory)

    def layer(self, number: int, groups: Sequence[T]) -> tuple[LayerCache, T]:
        """Return the keys and values of a layer, and what is of its group."""
        return self._by_layer[number], groups[self.layout.places[number].group]

    def from_layer(self, first: int) -> KVCache:
        """Return the same pages as a model sees them whose first layer is that one."""
        seen = copy.copy(self)
        seen.layout = self.layout._replace(places=self.layout.places[first:])
        seen._by_layer = self._by_layer[first:]
        return seen

    def in_groups(self, first: int, groups: Sequence[int]) -> KVCache:
        """Return the same pages, those of the layers from `first` on as parts of other groups."""
        seen, places = copy.copy(self), self.layout.places
        moved = (
            place._replace(group=group) for place, group in zip(places[first:], groups, strict=True)
        )
        seen.layout = self.layout._replace(places=(*places[:first], *moved))
        return seen


def bytes_per_block(spec: KVSpec, kernels: KernelSet) -> int:
    """Memory of one block over all layers, keys, values and hidden states."""
    elements = sum(math.prod(shape) for both in _shapes(spec, 1, kernels) for shape in both)
    hidden = spec.block_size * spec.kept_hidden
    return elements * spec.page_dtype.itemsize + hidden * spec.dtype.itemsize


def blocks_that_fit(budget_bytes: int, spec: KVSpec, kernels: KernelSet) -> int:
    """Return how many blocks, the null block included, fit into `budget_bytes`.

    Raises InvalidRequest when there would be no usable block.
    """
    each = bytes_per_block(spec, kernels)
    blocks = budget_bytes // each
    if blocks < NULL_BLOCK + 2:
        raise InvalidRequest(
            f"{budget_bytes} bytes for the KV cache hold {blocks} blocks of {each} bytes; "
            "two are the least",
            param="kv_cache_bytes",
        )
    return blocks


def _shapes(spec: KVSpec, num_blocks: int, kernels: KernelSet) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the keys and of the values of each layer of a block."""
    size = spec.block_size
    return [
        [(num_blocks, size, width) for width in layer]
        if isinstance(layer, LatentWidths)
        else [with_scales(kernels.kv_cache_shape(num_blocks, size, *layer), spec.page_dtype)] * 2
        for layer in spec.layers
    ]
