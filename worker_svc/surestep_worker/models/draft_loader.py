"""Loads what drafts from a folder of its own, beside the model that it is to draft for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_kernels.linear import INT8, Rounding

from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter
from surestep_worker.checkpoint.prepared import prepared
from surestep_worker.checkpoint.vocabulary import Vocabulary as TokenNames
from surestep_worker.checkpoint.vocabulary import check_vocabulary
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.configs.model_config import ModelConfig
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.draft_head import DraftHead
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.rotary import rotary_table

from .dflash import head as dflash
from .dflash.config import DFlashConfig
from .dflash.head import DFlashHead
from .draft_model import DraftModel
from .eagle3 import head as eagle3
from .eagle3.config import Eagle3Config
from .eagle3.head import Eagle3Head
from .loader import Model, load_model
from .source import CheckpointSource, ModelSource


def _any_attention(source: ModelSource, dtype: str) -> None:
    """Let every model pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """Where a head or a draft model is, and how it is to be read."""

    folder: Path
    model_folder: Path | None = None  # of the model that it is to draft for
    # After how many of the model's layers it reads hidden states; None: as its config.json says.
    layer_ids: Sequence[int] | None = None
    max_drafts: int = 0  # of a window
    store: WeightStore | None = None  # that outlives the rank; None: one that does not
    # Raises InvalidRequest for a model whose attention, in a dtype, the rank's kernels do not have.
    check_attention: Callable[[ModelSource, str], None] = _any_attention


class DraftRank(NamedTuple):
    """A rank that drafts: its device, its group, its kernels, and the longest sequence."""

    device: str
    tp: TensorParallel
    kernels: KernelSet
    max_model_len: int


class Load(Protocol):
    """Loads this rank's part of a head or a draft model; returns its fingerprint, too.

    No rank waits for another here. Raises InvalidRequest, naming the cause, for one that is broken,
    not served, or another model's, and StaleWeights for one in memory that these kernels cannot
    use.
    """

    def __call__(
        self, source: DraftSource, model: Model, rank: DraftRank
    ) -> tuple[DraftHead, str]: ...


class HeadKind(NamedTuple):
    """Draft heads of one method."""

    parse: Callable[[ConfigFiles, ModelConfig, Sequence[int] | None], Any]
    parameter_table: Callable[..., dict[str, Parameter]]
    ignored: tuple[str, ...]  # regular expressions of tensors of no use
    unread: tuple[str, ...]  # files without which a head that has them is another one
    make: Callable[[Any, LayerContext[Any], Vocabulary, int], DraftHead]

    def load(self, source: DraftSource, model: Model, rank: DraftRank) -> tuple[DraftHead, str]:
        """Load a head, see Load."""
        checkpoint = CheckpointSource(
            source.folder,
            lambda files: self.parse(files, model.config, source.layer_ids),
            source.store,
        )
        config, width = checkpoint.config, model.config.hidden_size
        decoder, vocabulary = config.decoder, model.vocabulary
        config.check_drafts(source.max_drafts)
        for name in self.unread:
            if (source.folder / name).exists():
                raise InvalidRequest(f"{name} is not served", param="speculative_config")
        shard = Sharding(_ranks_of(decoder, rank.tp))

        def open_checkpoint() -> CheckpointWeights:
            entries = checkpoint.entries
            return CheckpointWeights(
                entries,
                self.parameter_table(config, shard, entries.keys(), width, tied=vocabulary.tied),
                ignore=self.ignored,
                quantization=decoder.quantization,
                dtype=vocabulary.dtype,
                rounding=_rounding(rank.kernels, vocabulary.dtype),
            )

        store, facts = checkpoint.store, checkpoint.facts
        with prepared(store, facts, rank.kernels, rank.device, open_checkpoint) as weights:
            rotary = rotary_table(decoder.rope, decoder.rotary_dim, rank.max_model_len, rank.device)
            context = LayerContext(decoder, weights, shard, rank.kernels, rotary)
            head = self.make(config, context, vocabulary, len(model.kv_spec(1).windows))
        return head, checkpoint.fingerprint


HEAD_KINDS: Mapping[str, HeadKind] = {  # by method
    "eagle3": HeadKind(Eagle3Config.parse, eagle3.parameter_table, eagle3.IGNORED, (), Eagle3Head),
    "dflash": HeadKind(
        DFlashConfig.parse,
        dflash.parameter_table,
        dflash.IGNORED,
        ("mask_embedding.pt",),
        DFlashHead,
    ),
}


def load_draft_model(source: DraftSource, model: Model, rank: DraftRank) -> tuple[DraftModel, str]:
    """Load a draft model, see Load."""
    checkpoint = ModelSource(source.folder, source.store)
    config, dtype, vocab_size = checkpoint.config, model.vocabulary.dtype, model.config.vocab_size
    dtype_name = str(dtype).removeprefix("torch.")
    source.check_attention(checkpoint, dtype_name)
    if not checkpoint.store.sealed and source.model_folder is not None:
        check_vocabulary(
            TokenNames(source.folder, config.vocab_size),
            TokenNames(source.model_folder, vocab_size),
        )
    num_positions = min(rank.max_model_len, config.max_position)
    loaded = load_model(
        checkpoint,
        dtype=dtype_name,
        device=rank.device,
        tp=_ranks_of(config, rank.tp),
        kernels=rank.kernels,
        max_model_len=num_positions,
        rounding=_rounding(rank.kernels, dtype),
    )
    if not loaded.has_head:
        raise _refused(config, "has no output head")
    draft = DraftModel(
        loaded,
        first_cache_layer=len(model.kv_spec(1).windows),
        num_positions=num_positions,
        vocab_size=vocab_size,
    )
    return draft, checkpoint.fingerprint


def _refused(config: ModelConfig, reason: str) -> InvalidRequest:
    message = f"{config.architecture} {reason}: not served as a draft model"
    return InvalidRequest(message, param="speculative_config")


LOADERS: Mapping[str, Load] = {  # by method
    **{method: kind.load for method, kind in HEAD_KINDS.items()},
    "draft_model": load_draft_model,
}


def _rounding(kernels: KernelSet, dtype: torch.dtype) -> Rounding | None:
    """Return the rounding of its weights: drafts are as good, and cost half as much to read.

    In float32 it is as it was trained, as models are.
    """
    return INT8 if kernels.affine and dtype is not torch.float32 else None


def _ranks_of(config: ModelConfig, tp: TensorParallel) -> TensorParallel:
    """The ranks that share it; each has all of it where it does not divide among them."""
    try:
        config.check_ranks(tp.size)
    except InvalidRequest:
        return TensorParallel()
    return tp
