"""The pool of adapters of a rank that is built."""

from __future__ import annotations

import logging

import torch
from surestep_kernels import KernelSet

from surestep_worker.adapters.kernels import AdaptedKernels
from surestep_worker.adapters.pool import AdapterPool, Sizes
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.checkpoint.held_weights import WeightFds
from surestep_worker.config import WorkerSettings
from surestep_worker.models import Model

logger = logging.getLogger(__name__)


def adapter_pool(
    settings: WorkerSettings, model: Model, kernels: KernelSet, fds: WeightFds | None
) -> AdapterPool | None:
    """Return the pool of adapters, with what an earlier rank had in it; None: there is none."""
    if not isinstance(kernels, AdaptedKernels):
        return None
    memory = CacheMemory(fds.adapters) if fds is not None else None
    sizes, device = Sizes(settings.max_loras, settings.max_lora_rank), torch.device(settings.device)
    pool = AdapterPool(kernels.rows, sizes, model.vocabulary.dtype, device, memory)
    logger.info("%d adapters take up to %d KiB each", sizes.places, pool.place_bytes >> 10)
    return pool
