"""How large the caches of a rank are: as the settings say, as far as there is memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch
from surestep_kernels import KernelSet
from surestep_proto import engine_pb2 as pb

from .caches import Caches
from .config import WorkerSettings
from .host_memory import GIB, OutOfMemory, Room, room
from .kv_cache import CACHE_DTYPES, KVCache, KVSpec, blocks_that_fit, bytes_per_block
from .models import Model
from .recurrent import RecurrentCache, RecurrentSpec
from .tp import TensorParallel

logger = logging.getLogger(__name__)

_SNAPSHOTS_PER_SLOT = 8  # more would outlive the blocks of their prefixes
# Of the memory that is left: the rest is for activations, a standby and whatever else runs here.
_SHARES = {"kv_cache_memory": 0.6, "snapshot_memory": 0.2}
_SHARE_OF_PART = 0.85  # the same where somebody says what part of a GPU is ours
Field = Literal["kv_cache_memory", "snapshot_memory"]


class CacheBudget:
    """Sizes of the caches of one rank; those of an earlier rank, if it tells them, are kept."""

    def __init__(
        self, settings: WorkerSettings, tp: TensorParallel, known: pb.WorkerInfo | None = None
    ) -> None:
        self._settings = settings
        self._tp = tp
        self._known = known
        self._room = free_memory(settings.device)
        if settings.device == "cpu" and settings.gpu_memory_utilization is not None:
            logger.warning(
                "--gpu-memory-utilization does nothing on CPUs: --kv-cache-memory and "
                "--snapshot-memory say how large the caches are"
            )

    def allocate(
        self, model: Model, kernels: KernelSet, max_model_len: int, max_drafts: int
    ) -> Caches:
        """KV cache and recurrent cache. Raises OutOfMemory for sizes that were asked for and do
        not fit."""
        settings = self._settings
        cache_dtype = CACHE_DTYPES[settings.kv_cache_dtype]
        spec = replace(model.kv_spec(settings.block_size), cache_dtype=cache_dtype)
        if cache_dtype is not None:
            logger.info("KV cache of %s, not scaled", cache_dtype)
        recurrent, window = model.recurrent_spec(), max_drafts + 1
        others = self._recurrent_bytes(recurrent, window)
        num_blocks = self._num_blocks(spec, kernels, max_model_len, others)
        kv = KVCache(spec, num_blocks, kernels, settings.device)
        return Caches(kv, self._recurrent(recurrent, window))

    def _num_blocks(
        self, spec: KVSpec, kernels: KernelSet, max_model_len: int, others: int = 0
    ) -> int:
        """Blocks for the memory given, but no more than all slots at full length could use.

        Other caches are to take `others` bytes of a GPU.
        """
        if self._known is not None:
            return self._known.num_blocks
        settings, wanted = self._settings, self._kv_bytes(others)
        useful = 1 + settings.max_num_seqs * -(-max_model_len // settings.block_size)
        fit = blocks_that_fit(wanted, spec, kernels)
        wanted = min(fit, useful) * bytes_per_block(spec, kernels)
        budget = wanted if self._part_of_gpu else self._within_room("kv_cache_memory", wanted)
        return self._least(min(blocks_that_fit(budget, spec, kernels), useful))

    def _kv_bytes(self, others: int) -> int:
        """For KV blocks, as the settings say. Raises OutOfMemory."""
        if self._part_of_gpu is None:
            return int(self._settings.kv_cache_memory * GIB)
        free, total = torch.cuda.mem_get_info()
        return kv_part(self._part_of_gpu, free - others, total)

    @property
    def _part_of_gpu(self) -> float | None:
        """What of the GPU's memory this rank may take, if that says how large the KV cache is."""
        settings = self._settings
        sized = "kv_cache_memory" in settings.model_fields_set
        return None if sized or settings.device == "cpu" else settings.gpu_memory_utilization

    def _recurrent_bytes(self, spec: RecurrentSpec | None, window: int) -> int:
        """Of states and snapshots, at most."""
        if spec is None:
            return 0
        states = (self._settings.max_num_seqs + 1) * spec.slot_bytes(window)
        return states + int(self._settings.snapshot_memory * GIB)

    def _recurrent(self, spec: RecurrentSpec | None, window: int) -> RecurrentCache | None:
        """A state and the records of a window per slot, and snapshots for the memory given."""
        if spec is None:
            return None
        num_slots = self._settings.max_num_seqs
        states = (num_slots + 1) * spec.slot_bytes(window)
        if self._known is None and states > self._room.nbytes:
            message = "recurrent state of %d requests takes %.2f GiB: %s; --max-num-seqs lowers it"
            logger.warning(message, num_slots, states / GIB, self._room)
        return RecurrentCache(
            spec,
            num_slots=num_slots,
            window=window,
            num_snapshots=self._num_snapshots(spec),
            device=self._settings.device,
        )

    def _num_snapshots(self, spec: RecurrentSpec) -> int:
        if self._known is not None:
            return self._known.num_snapshots
        useful = _SNAPSHOTS_PER_SLOT * self._settings.max_num_seqs
        fit = int(self._settings.snapshot_memory * GIB) // spec.snapshot_bytes
        wanted = min(fit, useful) * spec.snapshot_bytes
        return self._least(self._within_room("snapshot_memory", wanted) // spec.snapshot_bytes)

    def _within_room(self, field: Field, wanted: int) -> int:
        """Bytes of a cache: less than wanted if the size is only a default."""
        room = self._room
        if field in self._settings.model_fields_set:
            if wanted > room.nbytes:
                flag = "--" + field.replace("_", "-")
                raise OutOfMemory(f"{flag}: {wanted / GIB:.2f} GiB, but only {room}", param=field)
            return wanted
        # The ranks of a group may be on one machine, and some of them not loaded yet.
        share = int(room.nbytes * _SHARES[field] / self._settings.ranks_here)
        if share < wanted:
            logger.warning(
                "%s is lowered from %.2f to %.2f GiB: %s", field, wanted / GIB, share / GIB, room
            )
        return min(share, wanted)

    def _least(self, count: int) -> int:
        """What every rank of the group has room for."""
        return int(self._tp.all_gather(torch.tensor([count])).min())


def kv_part(part: float, free: int, total: int) -> int:
    """Bytes for KV blocks on a GPU that holds the weights, of which a rank may take `part`.

    A part of what is left is for activations. Raises OutOfMemory.
    """
    left = int(part * total) - (total - free)
    if left <= 0:
        raise OutOfMemory(
            f"--gpu-memory-utilization {part:g}: {(total - free) / GIB:.2f} of {total / GIB:.2f} "
            "GiB are taken by weights and recurrent state",
            param="gpu_memory_utilization",
        )
    return int(left * _SHARE_OF_PART)


def free_memory(device: str) -> Room:
    """Where a rank's caches lie."""
    if device.startswith("cuda"):
        return Room(torch.cuda.mem_get_info()[0], "the memory of the GPU")
    return room()
