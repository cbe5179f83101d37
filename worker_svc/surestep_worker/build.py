"""Puts a rank together from its settings. Imports torch; runs on the step thread."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_proto import engine_pb2 as pb

from .config import WorkerSettings
from .kv_cache import KVCache, blocks_that_fit
from .models import Model, load_model
from .runner import Parts, Runner
from .sampling import SamplingSlots
from .slots import Slots
from .spec import SpeculativeConfig, make_drafter
from .tp import TensorParallel

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class Built(NamedTuple):
    """A runner ready for its first epoch, and the facts the Worker service reports of it."""

    runner: Runner
    facts: pb.WorkerInfo


def build_runner(settings: WorkerSettings) -> Built:
    """Load the model and allocate everything a rank needs.

    Raises InvalidRequest for settings the model cannot serve.
    """
    if settings.model is None:
        raise InvalidRequest("no model folder given", param="model")
    device = torch.device(settings.device)
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    kernels = load_kernels(settings.device)
    tp = TensorParallel.connect(
        settings.rank, settings.tensor_parallel_size, settings.tp_master, device
    )
    model = load_model(
        settings.model, dtype=settings.dtype, device=device, tp=tp, kernels=kernels
    )
    speculative = SpeculativeConfig.model_validate(settings.speculative_config or {"method": None})
    return assemble(settings, model, tp, device, speculative)


def assemble(
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    device: torch.device,
    speculative: SpeculativeConfig,
) -> Built:
    """A runner around a loaded model."""
    max_model_len = _max_model_len(settings, model)
    max_drafts = speculative.num_speculative_tokens
    kv = _allocate_kv(settings, model, max_model_len, device)
    slots = Slots(settings.max_num_seqs, max_model_len, max_drafts, settings.block_size)
    sampling = SamplingSlots(settings.max_num_seqs, model.config.vocab_size, device)
    drafter = make_drafter(speculative)
    runner = Runner(Parts(model, kv, slots, sampling, drafter, max_drafts, tp, device))
    facts = pb.WorkerInfo(
        model_path=str(settings.model),
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        num_slots=settings.max_num_seqs,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=settings.max_num_batched_tokens,
        drafter=speculative.method or "",
        max_draft_tokens=max_drafts,
        eos_token_ids=model.config.eos_token_ids,
        kv_cache_bytes=kv.num_bytes,
        weight_bytes=model.weight_bytes,
    )
    logger.info(
        "%d slots, %d KV blocks of %d tokens (%.2f GiB), drafter %s, K = %d",
        facts.num_slots,
        facts.num_blocks,
        facts.block_size,
        facts.kv_cache_bytes / _GIB,
        facts.drafter or "none",
        max_drafts,
    )
    return Built(runner, facts)


def _max_model_len(settings: WorkerSettings, model: Model) -> int:
    limit = model.config.max_position
    if settings.max_model_len is None:
        return limit
    if settings.max_model_len > limit:
        raise InvalidRequest(
            f"max_model_len {settings.max_model_len} exceeds the model's {limit} positions",
            param="max_model_len",
        )
    return settings.max_model_len
