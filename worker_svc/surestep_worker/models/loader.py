"""Loads a model: opens its checkpoint, lays out its weights and builds its decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from surestep_common.errors import InvalidRequest
from surestep_kernels import AttentionCase, KernelSet
from surestep_kernels.linear import Rounding
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVSpec
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.kv_scales import kv_scale_table
from surestep_worker.checkpoint.parameters import CheckpointWeights, Progress
from surestep_worker.checkpoint.prepared import prepared
from surestep_worker.configs.model_config import LATENT_ATTENTION, ModelConfig, resolve_dtype
from surestep_worker.configs.rope import RopeConfig
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host.host_memory import GIB, OutOfMemory, free_memory
from surestep_worker.layers.context import LayerContext, StepBatch
from surestep_worker.layers.decoder import Decoder
from surestep_worker.layers.draft_head import DraftHead
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.rotary import rotary_table

from .source import ModelSource


class Model(Protocol):
    """Model as the runner sees it: a rank's part of it."""

    @property
    def config(self) -> ModelConfig:
        """Architecture of the whole model."""

    weight_bytes: int  # of this rank's parameters
    draft_head: DraftHead | None  # that drafts for it
    vocabulary: Vocabulary
    hidden_bound: float  # no element of a normed hidden state is greater
    has_head: bool  # it makes logits
    capturable: bool  # CUDA graphs can hold its passes

    def kv_spec(self, block_size: int) -> KVSpec:
        """Return the contents of this rank's KV cache."""

    def recurrent_spec(self) -> RecurrentSpec | None:
        """Return the contents of this rank's recurrent cache; None without recurrent layers."""

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; returns the normed hidden [T, H]."""

    def rehearse(self) -> None:
        """Raise InvalidRequest if a row's result depends on its company."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank, with a head only."""


_ROTARY_BYTES = 12  # an element while the table is made: angles, cosines and sines of them, both


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loading a model."""

    dtype: str  # "auto", "float32" or "bfloat16"
    device: str
    max_model_len: int | None  # bounds the sequences, tokens; None: as the model allows
    draft_head: bool  # with the head that drafts for it
    expert_parallel: bool  # ranks share out whole experts
    rounding: Rounding | None  # of plain linear weights
    progress: Progress | None


def load_model(
    source: ModelSource,
    *,
    dtype: str,
    device: str,
    tp: TensorParallel,
    kernels: KernelSet,
    max_model_len: int | None = None,
    draft_head: bool = False,
    expert_parallel: bool = False,
    rounding: Rounding | None = None,
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
        draft_head=draft_head,
        expert_parallel=expert_parallel,
        rounding=rounding,
        progress=progress,
    )
    config, family = source.config, source.family
    config.check_length(options.max_model_len or config.max_position)
    config.check_ranks(tp.size, expert_parallel=options.expert_parallel)
    shard = Sharding(tp, options.expert_parallel)

    def open_checkpoint() -> CheckpointWeights:
        return _open_checkpoint(source, family, shard, options)

    with prepared(source.store, source.facts, kernels, options.device, open_checkpoint) as weights:
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        rotary = [_rotary(rope, config, options) for rope in ropes]
        context = LayerContext(config, weights, shard, kernels, *rotary)
        if family.decoder is None:
            return Decoder(context, family.feed_forward)
        model: Model = family.decoder(context)
        return model


def attention_case(source: ModelSource, device: str, dtype: str, block_size: int) -> AttentionCase:
    """Return the demands of a model on an attention backend."""
    return replace(
        AttentionCase.on(device),
        dtype=resolve_dtype(dtype, source.config),
        head_dim=source.config.head_dim,
        group=source.config.num_heads // source.config.num_kv_heads,
        block_size=block_size,
        window=source.config.sliding_window is not None,
        sinks=source.config.attention_sinks,
        softcap=source.config.attention_softcap > 0,
        latent=LATENT_ATTENTION in source.config.layer_types,
    )


def _open_checkpoint(
    source: ModelSource, family: Family[Any], shard: Sharding, options: LoadOptions
) -> CheckpointWeights:
    """Open the checkpoint. Raises InvalidRequest when it does not hold what the model wants."""
    config, names = source.config, source.entries.keys()
    if options.draft_head and family.draft_head is None:
        raise InvalidRequest(f"{config.architecture} has no MTP head", param="speculative_config")
    if options.draft_head and not source.has_own_head:
        raise InvalidRequest("the checkpoint has no MTP head", param="speculative_config")
    table = family.parameter_table(config, shard, names, draft_head=options.draft_head)
    checkpoint = CheckpointWeights(
        source.entries,
        {**table, **kv_scale_table(source.entries, config.num_layers)},
        ignore=family.ignored(config, shard, draft_head=options.draft_head),
        quantization=config.quantization,
        dtype=resolve_dtype(options.dtype, config),
        rounding=options.rounding,
        progress=options.progress,
    )
    _require_room("the weights", checkpoint.bytes_wanted, param="model")
    return checkpoint


def _rotary(rope: RopeConfig, config: ModelConfig, options: LoadOptions) -> Tensor:
    length, dim = options.max_model_len or config.max_position, config.rotary_dim
    _require_room(
        f"rotary tables of {length} tokens", length * dim * _ROTARY_BYTES, param="max_model_len"
    )
    return rotary_table(rope, dim, length, options.device)


def _require_room(what: str, nbytes: int, param: str) -> None:
    left = free_memory()
    if nbytes > left.nbytes:
        message = f"{what} take {nbytes / GIB:.2f} GiB of memory, but only {left}"
        raise OutOfMemory(message, param=param)
