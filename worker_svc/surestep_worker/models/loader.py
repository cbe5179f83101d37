"""Loads a model: which architecture names are served, and how each becomes a Model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from surestep_common.registry import Registry
from surestep_kernels import KernelSet
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.kv_cache import KVCache, KVSpec
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.tp import TensorParallel

from .config import DENSE_ARCHITECTURES, ModelConfig, architecture_of, read_json, resolve_dtype
from .weights import Progress, Weights


class Model(Protocol):
    """What the runner needs of a model: one rank's part of it."""

    config: ModelConfig
    weight_bytes: int  # of this rank's parameters

    def kv_spec(self, block_size: int) -> KVSpec:
        """What this rank's KV cache must hold."""

    def forward(self, batch: StepBatch, kv: KVCache) -> Tensor:
        """Consume T tokens, writing their keys and values; returns the normed hidden [T, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""


MODELS: Registry[Model] = Registry("architecture")


def load_model(
    path: Path,
    *,
    dtype: str,
    device: str,
    tp: TensorParallel,
    kernels: KernelSet,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load this rank's part of the model in folder `path`.

    dtype is "auto", "float32" or "bfloat16"; max_model_len (tokens) bounds the sequences and is
    config.max_length by default. Raises InvalidRequest, naming the cause, for a model or a
    checkpoint that is not served.
    """
    architecture = architecture_of(read_json(path / "config.json"))
    return MODELS.get(architecture)(
        path,
        dtype=dtype,
        device=device,
        tp=tp,
        kernels=kernels,
        max_model_len=max_model_len,
        progress=progress,
    )


def _load_dense(
    path: Path,
    *,
    dtype: str,
    device: str,
    tp: TensorParallel,
    kernels: KernelSet,
    max_model_len: int | None,
    progress: Progress | None,
) -> Model:
    from .dense import DenseModel
    from .dense_weights import ignored, parameter_table

    config = ModelConfig.from_pretrained(path)
    length = max_model_len or config.max_length
    config.check_length(length)
    config.check_ranks(tp.size)
    with Weights(
        path,
        parameter_table(config, tp),
        ignore=ignored(config),
        dtype=resolve_dtype(dtype, config),
        device=device,
        progress=progress,
    ) as weights:
        rotary = rotary_table(config.rope, config.head_dim, length, device)
        return DenseModel(config, weights, tp, kernels, rotary)


for _architecture in DENSE_ARCHITECTURES:
    MODELS.register(_architecture)(_load_dense)
