"""Loads a draft head that has a folder of its own, beside the model that it is to draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_kernels.linear import INT8, Rounding

from surestep_worker.checkpoint.parameters import CheckpointWeights
from surestep_worker.checkpoint.prepared import prepared
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.rotary import rotary_table

from .eagle3.config import Eagle3Config
from .eagle3.head import IGNORED, Eagle3Head, parameter_table
from .loader import Model
from .source import CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """Where a head is, and how it is to be read."""

    folder: Path
    # After how many of the model's layers it reads hidden states; None: as its config.json says.
    layer_ids: Sequence[int] | None = None
    store: WeightStore | None = None  # that outlives the rank; None: one that does not


def load_eagle3(
    source: DraftSource,
    model: Model,
    *,
    device: str,
    tp: TensorParallel,
    kernels: KernelSet,
    max_model_len: int,
) -> tuple[Eagle3Head, str]:
    """Load this rank's part of a head; return its fingerprint, too.

    No rank waits for another here. Raises InvalidRequest, naming the cause, for a head that is
    broken, not served, or another model's, and StaleWeights for one in memory that these kernels
    cannot use.
    """
    checkpoint = CheckpointSource(
        source.folder,
        lambda files: Eagle3Config.parse(files, model.config, source.layer_ids),
        source.store,
    )
    config = checkpoint.config
    shard, decoder = Sharding(_ranks_of(config, tp)), config.decoder
    width = model.config.hidden_size

    def open_checkpoint() -> CheckpointWeights:
        entries = checkpoint.entries
        return CheckpointWeights(
            entries,
            parameter_table(config, shard, entries.keys(), width, tied=model.vocabulary.tied),
            ignore=IGNORED,
            quantization=decoder.quantization,
            dtype=model.vocabulary.dtype,
            rounding=_rounding(kernels, model.vocabulary.dtype),
        )

    store, facts = checkpoint.store, checkpoint.facts
    with prepared(store, facts, kernels, device, open_checkpoint) as weights:
        rotary = rotary_table(decoder.rope, decoder.rotary_dim, max_model_len, device)
        context = LayerContext(decoder, weights, shard, kernels, rotary)
        first_layer = len(model.kv_spec(1).windows)
        head = Eagle3Head(config, context, model.vocabulary, first_layer)
    return head, checkpoint.fingerprint


def _rounding(kernels: KernelSet, dtype: torch.dtype) -> Rounding | None:
    """What the weights of a head are rounded to: drafts are as good, and cost half as much to read.

    In float32 a head is as it was trained, as models are.
    """
    return INT8 if kernels.affine and dtype is not torch.float32 else None


def _ranks_of(config: Eagle3Config, tp: TensorParallel) -> TensorParallel:
    """The ranks that share the head; each has all of it where it does not divide among them."""
    try:
        config.decoder.check_ranks(tp.size)
    except InvalidRequest:
        return TensorParallel()
    return tp
