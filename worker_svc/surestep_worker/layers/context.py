"""Surroundings of a layer: the model that it is built for, and the rows of a step that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from surestep_kernels import KernelSet
from surestep_kernels.dense_layer import LayerTokens
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from torch import Tensor

from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.configs.model_config import ModelConfig

from .linear import Sharding

C_co = TypeVar("C_co", bound=ModelConfig, covariant=True)


class LayerContext(NamedTuple, Generic[C_co]):
    """View of a rank on a model that is being built."""

    config: C_co
    weights: Weights
    shard: Sharding
    kernels: KernelSet
    rotary: Tensor  # f32[P, D'], see rotary_table
    local_rotary: Tensor | None = None  # of layers with a window; None: `rotary`


class GroupPages(NamedTuple):
    """Where the layers of one KV group read and write."""

    rows: AttentionRows  # behind the last page of a slot, and where others were, is NULL_BLOCK
    kv_slots: Tensor  # i64[T] block * block_size + offset that receives the token's key and value


@dataclass(slots=True)
class Choice:
    """Positions that indexers chose for the tokens of a step."""

    positions: Tensor | None = None  # i32[T, K] of the last: layers without one attend to them
    sums: list[Tensor] = field(default_factory=list)  # i32[T] of each, where ranks compare them

    def choose(self, positions: Tensor, *, compared: bool) -> None:
        """Note what the next indexer chose."""
        self.positions = positions
        if compared:
            sums = (positions * positions + positions).sum(dim=1, dtype=torch.int32)  # wrapping
            self.sums.append(sums)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of R rows, all on the model's device."""

    token_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T] index of each token in its sequence
    groups: tuple[GroupPages, ...]  # of the KV cache, see KVLayout
    hidden_index: Tensor  # i64[N] tokens (indices into T) whose final hidden states are wanted
    recurrent: RecurrentRows | None = None  # for models with recurrent layers
    choice: Choice = field(default_factory=Choice)  # for models with indexers
    layer_tokens: tuple[LayerTokens, ...] = field(init=False)  # by KV group

    def __post_init__(self) -> None:
        tokens = tuple(LayerTokens(self.positions, *pages) for pages in self.groups)
        object.__setattr__(self, "layer_tokens", tokens)
