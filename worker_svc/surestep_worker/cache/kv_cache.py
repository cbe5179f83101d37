"""The paged key/value cache of one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels import KernelSet
from surestep_kernels.store_kv import FP8, INT8, LayerCache, with_scales

from .kv_layout import KVLayout
from .pages import zero_pages

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
    draft_layers: tuple[KVHeads, ...] = ()  # behind the model's: of a draft head from elsewhere
    latents: tuple[LatentWidths, ...] = ()  # of the model's layers, if they have these

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


class KVCache:
    """Key and value pages of every layer of a block, NULL_BLOCK included, which no slot owns."""

    def __init__(self, spec: KVSpec, num_blocks: int, kernels: KernelSet, device: str) -> None:
        assert num_blocks > NULL_BLOCK + 1, "no block besides the null block"
        self.spec = spec
        self.num_blocks = num_blocks
        self.layout = spec.layout
        self.layers = [
            LayerCache(*(zero_pages(shape, spec.page_dtype, device) for shape in shapes))
            for shapes in _shapes(spec, num_blocks, kernels)
        ]
        hidden = (num_blocks * spec.block_size, spec.kept_hidden)
        # By flat slot, as kv_slots of group 0 name them.
        self.hidden = zero_pages(hidden, spec.dtype, device)

    def layer(self, number: int, groups: Sequence[T]) -> tuple[LayerCache, T]:
        """Return the keys and values of a layer, and what is of its group."""
        group, layer = self.layout.places[number]
        return self.layers[layer], groups[group]


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
