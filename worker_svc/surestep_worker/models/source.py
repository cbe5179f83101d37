"""Where a rank's model comes from: its folder once, then the memory that outlives the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from surestep_common.errors import InvalidRequest, Unavailable

from surestep_worker.checkpoint.held_weights import StaleWeights
from surestep_worker.checkpoint.model_folder import (
    AS_IT_IS,
    ConfigFiles,
    Replacements,
    fingerprint,
    fingerprint_of,
    quant_method,
    read_entries,
)
from surestep_worker.checkpoint.safetensors_header import Entry
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.checkpoint.weight_update import with_update
from surestep_worker.configs.model_config import ModelConfig, architecture_of
from surestep_worker.distributed.tensor_parallel import TensorParallel

from .families import AUTO, family_of

C = TypeVar("C")


class CheckpointSource(Generic[C]):
    """Configuration, fingerprint and weights of a checkpoint.

    A sealed store has all of them, and the folder is not opened: it may be gone, or hold another
    checkpoint by now.
    """

    def __init__(
        self,
        folder: Path,
        parse: Callable[[ConfigFiles], C],
        store: WeightStore | None = None,
        replaced: Replacements = AS_IT_IS,
        update: Path | None = None,
    ) -> None:
        """Tensors in the safetensors file `update` come in place of the folder's.

        Raises InvalidRequest for a folder without a checkpoint, and what `parse` raises.
        """
        self.store = store or WeightStore.private()
        self.folder = folder
        self._replaced = replaced
        self._update = update
        facts = self.store.facts
        if self.store.sealed:
            self._files = ConfigFiles(*(facts[name] for name in ConfigFiles._fields))
        else:
            self._files = ConfigFiles.read(folder, replaced)
        self.config = parse(self._files)
        self.entries: Mapping[str, Entry] = {}  # of the checkpoint; not needed once it is loaded
        if self.store.sealed:
            self.fingerprint: str = facts["fingerprint"]
        else:
            self.entries = with_update(read_entries(folder), update)
            self.fingerprint = fingerprint(self._files, self.entries)
            files = self._files.with_head_of(self.entries)
            if files is not self._files:
                self._files, self.config = files, parse(files)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that a sealed store must tell, for JSON."""
        return {**self._files._asdict(), "fingerprint": self.fingerprint}


class ModelSource(CheckpointSource[ModelConfig]):
    """Source of a model."""

    def __init__(
        self,
        folder: Path,
        store: WeightStore | None = None,
        replaced: Replacements = AS_IT_IS,
        implementation: str = AUTO,
        update: Path | None = None,
    ) -> None:
        """Raises InvalidRequest for a folder that holds no model that is served."""
        self._implementation = implementation
        super().__init__(folder, self._parse, store, replaced, update)

    def _parse(self, files: ConfigFiles) -> ModelConfig:
        self.family = family_of(architecture_of(files.config), self._implementation)
        config: ModelConfig = self.family.parse(files)
        return config

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**super().facts, "has_own_head": self.has_own_head}

    @property
    def has_own_head(self) -> bool:
        """Presence of a head that drafts for the model, beside it."""
        if self.store.sealed:
            return bool(self.store.facts["has_own_head"])
        begins = self.family.head_begins(self.config)
        return begins is not None and any(name.startswith(begins) for name in self.entries)

    @property
    def generation(self) -> Mapping[str, Any]:
        """The generation config."""
        return self._files.generation

    @property
    def quant_method(self) -> str | None:
        """Quantisation method that the checkpoint names."""
        return quant_method(self._files.config)

    def lies_in_folder(self) -> str:
        """Fingerprint of what the folder holds now; empty when that is no checkpoint, or not all
        that is to be loaded.
        """
        if self._update is not None:
            return ""
        try:
            return fingerprint_of(self.folder, self._replaced)
        except InvalidRequest:
            return ""


def gather_fingerprints(mine: str, tp: TensorParallel) -> list[str]:
    """Return every rank's fingerprint, in the order of ranks; all are of one length."""
    lines = tp.all_gather(torch.tensor(list(mine.encode()))).view(tp.size, -1).tolist()
    return [bytes(line).decode() for line in lines]


def check_alike(source: ModelSource, tp: TensorParallel) -> None:
    """See to it that all ranks have the same checkpoint, before they compute together.

    Raises Unavailable when they have not, and StaleWeights on a rank whose weights in memory are
    older than what its folder and the other ranks hold by now.
    """
    prints = gather_fingerprints(source.fingerprint, tp)
    strangers = [rank for rank, other in enumerate(prints) if other != source.fingerprint]
    if not strangers:
        return
    if source.store.sealed and source.lies_in_folder() in {prints[rank] for rank in strangers}:
        raise StaleWeights(f"{source.folder} holds another model now, as the other ranks have it")
    raise Unavailable(f"rank {strangers[0]} has another checkpoint than {source.folder}")
