"""Parts that the layers of a model are built from."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from surestep_kernels import KernelSet
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
