"""Loads a model: which architecture names are served, and how each becomes a Model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from surestep_common.errors import InvalidRequest
from surestep_common.registry import Registry
from surestep_kernels import AttentionCase, KernelSet
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.host_memory import GIB, OutOfMemory, room
from surestep_worker.kv_cache import KVSpec
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.recurrent import RecurrentSpec
from surestep_worker.tp import TensorParallel

from .config import BACKBONES, DENSE_ARCHITECTURES, ModelConfig, resolve_dtype
from .hybrid_config import HYBRID_ARCHITECTURES, HybridConfig
from .mtp import MtpHead
from .prepared import prepared
from .source import ModelSource
from .weights import CheckpointWeights, Progress, Table


class Model(Protocol):
    """What the runner needs of a model: one rank's part of it."""

    @property
    def config(self) -> ModelConfig:
        """Architecture of the whole model."""

    weight_bytes: int  # of this rank's parameters
    mtp: MtpHead | None  # if it was asked for
    hidden_bound: float  # no element of a normed hidden state is greater
    has_head: bool  # it makes logits

    def kv_spec(self, block_size: int) -> KVSpec:
        """What this rank's KV cache must hold."""

    def recurrent_spec(self) -> RecurrentSpec | None:
        """What this rank's recurrent cache must hold; None without recurrent layers."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T]."""

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; returns the normed hidden [T, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank, with a head only."""


_ROTARY_BYTES = 12  # an element while the table is made: angles, cosines and sines of them, both

MODELS: Registry[Model] = Registry("architecture")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is to be loaded."""

    dtype: str  # "auto", "float32" or "bfloat16"
    device: str
    max_model_len: int | None  # bounds the sequences, tokens; None: as the model allows
    mtp: bool  # with its multi-token prediction head
    expert_parallel: bool  # ranks share out whole experts
    progress: Progress | None


def load_model(
    source: ModelSource,
    *,
    dtype: str,
    device: str,
    tp: TensorParallel,
    kernels: KernelSet,
    max_model_len: int | None = None,
    mtp: bool = False,
    expert_parallel: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Load this rank's part of a model; see LoadOptions.

    Raises InvalidRequest, naming the cause, for a model or a checkpoint that is not served, and
    StaleWeights for weights in memory that these kernels cannot use.
    """
    options = LoadOptions(
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        mtp=mtp,
        expert_parallel=expert_parallel,
        progress=progress,
    )
    return MODELS.get(source.config.architecture)(source, tp, kernels, options)


def attention_case(source: ModelSource, device: str, dtype: str, block_size: int) -> AttentionCase:
    """What a model asks of an attention backend."""
    return replace(
        AttentionCase.on(device),
        dtype=resolve_dtype(dtype, source.config),
        head_dim=source.config.head_dim,
        group=source.config.num_heads // source.config.num_kv_heads,
        block_size=block_size,
    )


def _load_dense(
    source: ModelSource, tp: TensorParallel, kernels: KernelSet, options: LoadOptions
) -> Model:
    from .dense import DenseModel
    from .dense_weights import Layout, ignored, parameter_table

    config = source.config
    _check(config, tp, options)
    if options.mtp:
        raise InvalidRequest(f"{config.architecture} has no MTP head", param="speculative_config")

    def checkpoint() -> CheckpointWeights:
        layout = Layout.of(config, source.entries)
        return _open(source, parameter_table(config, tp, layout), ignored(config), options)

    with prepared(source, kernels, options.device, checkpoint) as weights:
        rotary = _rotary(config, config.head_dim, options)
        return DenseModel(config, weights, tp, kernels, rotary)


def _load_hybrid(
    source: ModelSource, tp: TensorParallel, kernels: KernelSet, options: LoadOptions
) -> Model:
    from .hybrid import HybridModel
    from .hybrid_weights import ignored, parameter_table

    config = source.config
    assert isinstance(config, HybridConfig)
    _check(config, tp, options)
    config.check_experts(tp.size, whole=options.expert_parallel)
    shard = Sharding(tp, options.expert_parallel)

    def checkpoint() -> CheckpointWeights:
        names = source.entries.keys()
        if options.mtp and not any(name.startswith("mtp.") for name in names):
            raise InvalidRequest("the checkpoint has no MTP head", param="speculative_config")
        table = parameter_table(config, shard, names, mtp=options.mtp)
        return _open(source, table, ignored(config, shard, mtp=options.mtp), options)

    with prepared(source, kernels, options.device, checkpoint) as weights:
        rotary = _rotary(config, config.rotary_dim, options)
        return HybridModel(config, weights, shard, kernels, rotary)


def _check(config: ModelConfig, tp: TensorParallel, options: LoadOptions) -> None:
    """Whether the model can be served like that."""
    config.check_length(options.max_model_len or config.max_length)
    config.check_ranks(tp.size)


def _open(
    source: ModelSource, table: Table, ignore: Iterable[str], options: LoadOptions
) -> CheckpointWeights:
    """The checkpoint, when it holds what the table wants and there is memory for it."""
    checkpoint = CheckpointWeights(
        source.entries,
        table,
        ignore=ignore,
        quantization=source.config.quantization,
        dtype=resolve_dtype(options.dtype, source.config),
        progress=options.progress,
    )
    _require_room("the weights", checkpoint.bytes_wanted, param="model")
    return checkpoint


def _rotary(config: ModelConfig, dim: int, options: LoadOptions) -> Tensor:
    length = options.max_model_len or config.max_length
    _require_room(
        f"rotary tables of {length} tokens", length * dim * _ROTARY_BYTES, param="max_model_len"
    )
    return rotary_table(config.rope, dim, length, options.device)


def _require_room(what: str, nbytes: int, param: str) -> None:
    left = room()
    if nbytes > left.nbytes:
        message = f"{what} take {nbytes / GIB:.2f} GiB of memory, but only {left}"
        raise OutOfMemory(message, param=param)


for _architecture in (*DENSE_ARCHITECTURES, *BACKBONES):
    MODELS.register(_architecture)(_load_dense)
for _architecture in HYBRID_ARCHITECTURES:
    MODELS.register(_architecture)(_load_hybrid)
