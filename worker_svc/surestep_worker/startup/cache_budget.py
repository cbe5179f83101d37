"""The sizes of a rank's caches: as set, as far as memory allows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from surestep_common.kv_groups import KVGroups
from surestep_kernels import KernelSet
from surestep_kernels.store_kv import INT8

from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.held_caches import Books, HeldCaches
from surestep_worker.cache.kv_cache import (
    CACHE_DTYPES,
    KVCache,
    KVSpec,
    blocks_that_fit,
    bytes_per_block,
)
from surestep_worker.cache.recurrent import DraftStates, RecurrentCache, RecurrentSpec
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host.host_memory import GIB, FreeMemory, OutOfMemory, free_memory
from surestep_worker.models import Model

from .gpu_memory import PAGE

logger = logging.getLogger(__name__)

_SNAPSHOTS_PER_SLOT = 8  # more would outlive the blocks of their prefixes
# Of the free memory: the rest is for activations, a standby and other processes.
_SHARES = {"kv_cache_memory": 0.6, "snapshot_memory": 0.2}
Field = Literal["kv_cache_memory", "snapshot_memory"]


class CacheSizes(NamedTuple):
    """Sizes of one rank's caches, equal on every rank of a group."""

    num_blocks: int  # NULL block included
    num_snapshots: int = 0


MIN_CACHE_SIZES = CacheSizes(num_blocks=2)  # enough for every step, though not for every request


class CacheBudget:
    """Decides the sizes of one rank's caches."""

    def __init__(
        self, settings: WorkerSettings, tp: TensorParallel, left: int | None = None
    ) -> None:
        """`left`: bytes measured to be available for caches alone; None: other uses share the free
        memory."""
        self._settings, self._tp = settings, tp
        self._measured = left is not None
        self._room = (
            _free(settings.device) if left is None else FreeMemory(left, "the GPU for caches")
        )
        if settings.device == "cpu" and "gpu_memory_utilization" in settings.model_fields_set:
            logger.warning(
                "--gpu-memory-utilization does nothing on CPUs: --kv-cache-memory and "
                "--snapshot-memory say how large the caches are"
            )

    def sizes(
        self, model: Model, kernels: KernelSet, max_model_len: int, max_drafts: int
    ) -> CacheSizes:
        """Return the sizes. Raises OutOfMemory if a size that was set does not fit."""
        spec, recurrent = kv_spec(self._settings, model), model.recurrent_spec()
        if not self._measured:
            self._warn_of_states(recurrent, draft_states(model), max_drafts + 1)
        if spec.cache_dtype is not None:
            own = "with the checkpoint's scales" if spec.scaled else "not scaled"
            scaled = "a scale for each position and head" if spec.cache_dtype is INT8 else own
            logger.info("KV cache of %s, %s", spec.cache_dtype, scaled)
        if spec.scales and not spec.scaled:
            logger.info(
                "the checkpoint's scales of keys and values are not used: pages hold %s",
                "latents" if spec.latents else spec.page_dtype,
            )
        if recurrent is not None:
            self._reserve(2 * recurrent.num_layers, PAGE)  # each tensor of snapshots begins at one
        snapshots = 0
        if recurrent is not None and not self._blocks_are_given:
            snapshots = self._num_snapshots(recurrent)
        blocks = self._num_blocks(spec, kernels, max_model_len)
        if recurrent is not None and self._blocks_are_given:
            snapshots = self._num_snapshots(recurrent)
        return CacheSizes(blocks, snapshots)

    @property
    def _blocks_are_given(self) -> bool:
        """Return whether the settings fix the size of the KV cache."""
        given = self._settings.model_fields_set
        return bool(given & {"kv_cache_memory", "num_gpu_blocks_override"})

    def _num_blocks(self, spec: KVSpec, kernels: KernelSet, max_model_len: int) -> int:
        settings, each = self._settings, bytes_per_block(spec, kernels)
        if settings.num_gpu_blocks_override is not None:
            wanted = settings.num_gpu_blocks_override * each
            self._check_fits("num_gpu_blocks_override", wanted)
            return self._reserve(settings.num_gpu_blocks_override, each)
        if self._measured and not self._blocks_are_given:
            rounding = (2 * len(spec.layers) + 1) * PAGE  # each tensor begins at a page
            budget = max(0, self._room.nbytes - rounding)
            blocks = self._min_over_ranks(blocks_that_fit(budget, spec, kernels))
            self._check_length(blocks, spec, kernels, max_model_len)
            return blocks
        # No more than all slots at full length could use.
        whole = -(-max_model_len // settings.block_size)
        useful = 1 + settings.max_num_seqs * whole * len(spec.layout.windows)
        fit = blocks_that_fit(int(settings.kv_cache_memory * GIB), spec, kernels)
        budget = self._fit_default("kv_cache_memory", min(fit, useful) * each)
        blocks = self._min_over_ranks(min(blocks_that_fit(budget, spec, kernels), useful))
        return self._reserve(blocks, each)

    def _check_length(
        self, blocks: int, spec: KVSpec, kernels: KernelSet, max_model_len: int
    ) -> None:
        """Raise OutOfMemory if a request of the length that was set would not fit alone."""
        each, groups = (
            bytes_per_block(spec, kernels),
            KVGroups(spec.layout.windows, spec.block_size),
        )
        longest = groups.longest(blocks - 1, max_model_len) + 1  # the newest needs no block yet
        if longest >= max_model_len:
            return
        needed, left = 1 + groups.blocks_of(max_model_len - 1), blocks * each
        about = (
            f"a request of {max_model_len} tokens takes {needed * each / GIB:.2f} GiB of KV "
            f"blocks, and {left / GIB:.2f} GiB are left for them: {longest} tokens fit"
        )
        remedies = (
            f"a higher --gpu-memory-utilization (now {self._settings.gpu_memory_utilization:g}), "
            "--kv-cache-dtype fp8 or more GPUs make room"
        )
        if self._settings.max_model_len is None:
            logger.warning("%s; %s", about, remedies)
            return
        raise OutOfMemory(
            f"--max-model-len {max_model_len}: {about}; --max-model-len {longest} would do, "
            f"{remedies}",
            param="max_model_len",
        )

    def _warn_of_states(
        self, spec: RecurrentSpec | None, draft: RecurrentSpec | None, window: int
    ) -> None:
        num_slots = self._settings.max_num_seqs
        each = spec.slot_bytes(window) if spec is not None else 0
        each += 2 * draft.snapshot_bytes if draft is not None else 0
        states = (num_slots + 1) * each
        if states > self._room.nbytes:
            message = "recurrent state of %d requests takes %.2f GiB: %s; --max-num-seqs lowers it"
            logger.warning(message, num_slots, states / GIB, self._room)

    def _num_snapshots(self, spec: RecurrentSpec) -> int:
        settings, each = self._settings, spec.snapshot_bytes
        useful = _SNAPSHOTS_PER_SLOT * settings.max_num_seqs
        if self._measured and "snapshot_memory" not in settings.model_fields_set:
            budget = int(_SHARES["snapshot_memory"] * self._room.nbytes)
        else:
            budget = int(settings.snapshot_memory * GIB)
            budget = self._fit_default("snapshot_memory", min(budget // each, useful) * each)
        return self._reserve(self._min_over_ranks(min(budget // each, useful)), each)

    def _fit_default(self, field: Field, wanted: int) -> int:
        """Return the bytes of a cache: less than `wanted` if the size is only a default."""
        room = self._room
        if field in self._settings.model_fields_set:
            return self._check_fits(field, wanted)
        # The ranks of a group may be on one machine, and some of them not loaded yet.
        sharers = self._settings.ranks_here * self._settings.models_here
        share = int(room.nbytes * _SHARES[field] / sharers)
        if share < wanted:
            logger.warning(
                "%s is lowered from %.2f to %.2f GiB: %s", field, wanted / GIB, share / GIB, room
            )
        return min(share, wanted)

    def _check_fits(self, field: str, wanted: int) -> int:
        """Return `wanted` if it fits; raise OutOfMemory otherwise."""
        if wanted > self._room.nbytes:
            flag = "--" + field.replace("_", "-")
            message = f"{flag}: {wanted / GIB:.2f} GiB, but only {self._room}"
            raise OutOfMemory(message, param=field)
        return wanted

    def _reserve(self, count: int, each: int) -> int:
        """Subtract `count` times `each` bytes from what was measured; return `count`."""
        if self._measured:
            self._room = self._room._replace(nbytes=max(0, self._room.nbytes - count * each))
        return count

    def _min_over_ranks(self, count: int) -> int:
        """Return the least count of all ranks of the group."""
        return int(self._tp.all_gather(torch.tensor([count])).min())


def allocate(
    settings: WorkerSettings,
    model: Model,
    kernels: KernelSet,
    sizes: CacheSizes,
    window: int,
    memory: CacheMemory | None = None,
) -> Caches:
    """Allocate caches of these sizes: blocks, a state and the records of a window per slot,
    snapshots. Blocks and snapshots lie in `memory` if there is one."""
    spec, recurrent = kv_spec(settings, model), model.recurrent_spec()
    books = None
    if memory is not None:
        memory.rewind()
        books = Books.open(memory, sizes.num_blocks, sizes.num_snapshots)
    kv = KVCache(spec, sizes.num_blocks, kernels, settings.device, memory)
    states = None
    if recurrent is not None:
        states = RecurrentCache(
            recurrent,
            num_slots=settings.max_num_seqs,
            window=window,
            num_snapshots=sizes.num_snapshots,
            device=settings.device,
            memory=memory,
        )
    held = HeldCaches(books, kv, states, kernels.digest_pages) if books is not None else None
    ahead = draft_states(model)
    draft = DraftStates(ahead, settings.max_num_seqs, settings.device) if ahead else None
    return Caches(kv, states, held, draft)


def draft_states(model: Model) -> RecurrentSpec | None:
    """Return the states of what drafts; None where it has no recurrent layers."""
    return model.draft_head.recurrent if model.draft_head is not None else None


def kv_spec(settings: WorkerSettings, model: Model) -> KVSpec:
    """Return the model's KV blocks, with the cache dtype that is set."""
    cache_dtype = CACHE_DTYPES[settings.kv_cache_dtype]
    return replace(model.kv_spec(settings.block_size), cache_dtype=cache_dtype)


def _free(device: str) -> FreeMemory:
    """Return the free memory of the device that holds the caches."""
    if device.startswith("cuda"):
        return FreeMemory(torch.cuda.mem_get_info()[0], "the memory of the GPU")
    return free_memory()
