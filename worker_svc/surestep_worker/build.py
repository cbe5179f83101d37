"""Puts a rank together from its settings. Imports torch; runs on the step thread."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_proto import engine_pb2 as pb

from .caches import Caches
from .config import WorkerSettings
from .heartbeat import Heartbeat
from .kv_cache import CACHE_DTYPES, KVCache, blocks_that_fit, bytes_per_block
from .models import Model, attention_case, load_model
from .models.weight_store import WeightStore
from .models.weights import Progress
from .parts import Parts
from .recurrent import RecurrentCache
from .rehearsal import check_drafter, measure_costs
from .runner import Runner
from .sampling import SamplingSlots
from .slots import Slots
from .spec import DRAFTERS, Drafter, StatefulDrafter, Target
from .spec.config import SpeculativeConfig
from .tp import TensorParallel

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MIB = 1 << 20
_TP_TIMEOUT_S = 60.0  # a rank that does not arrive at a collective; step deadlines are far shorter
_SNAPSHOTS_PER_SLOT = 8  # more would outlive the blocks of their prefixes
_CHECK_FLOOR = 0.05  # share of drafts: a sound head reaches several times as much on any text
_PROGRESS_STEP = 0.1  # of the checkpoint, between two log lines


class Built(NamedTuple):
    """A runner ready for its first epoch, and the facts the Worker service reports of it."""

    runner: Runner
    facts: pb.WorkerInfo

    @property
    def memo(self) -> bytes:
        """What was measured: for the rank that comes after this one."""
        facts = self.facts
        return pb.WorkerInfo(
            costs=facts.costs,
            check_drafts=facts.check_drafts,
            check_accepted=facts.check_accepted,
        ).SerializeToString()


def build_runner(
    settings: WorkerSettings,
    heartbeat: Heartbeat | None = None,
    weights_fd: int | None = None,
    memo: bytes = b"",
) -> Built:
    """Load the model and allocate everything a rank needs.

    What the `memo` of an earlier rank tells is not measured again. Raises InvalidRequest for
    settings the model cannot serve.
    """
    heartbeat = heartbeat or Heartbeat.unseen()
    heartbeat.progress(pb.LOADING)
    if settings.model is None:
        raise InvalidRequest("no model folder given", param="model")
    speculation = _speculation(settings)
    _take_gpu(settings)
    kernels = _kernels(settings, settings.model)
    kernels.set_num_threads(settings.cpu_threads or _share_of_cores(settings))
    tp = TensorParallel.connect(
        settings.rank,
        settings.tensor_parallel_size,
        settings.tp_master,
        settings.device,
        _TP_TIMEOUT_S,
    )
    measured = _all_know(memo, tp)
    model = load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        tp=tp,
        kernels=kernels,
        max_model_len=settings.max_model_len,
        mtp=speculation is not None and speculation.method == "mtp",
        expert_parallel=settings.enable_expert_parallel,
        progress=_show_progress(heartbeat),
        store=WeightStore(weights_fd) if weights_fd is not None else None,
    )
    built = assemble(settings, model, tp, kernels, heartbeat)
    heartbeat.progress(pb.WARMING_UP)
    built.runner.prepare()
    if measured:
        built.facts.MergeFrom(pb.WorkerInfo.FromString(memo))
    else:
        _rehearse(built)
    kernels.compilations.serve()
    return built


def _take_gpu(settings: WorkerSettings) -> None:
    """What "cuda" means on this thread from here on: the GPU that is this rank's."""
    if settings.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise InvalidRequest("there is no CUDA device here", param="device")
    torch.cuda.set_device(settings.rank % torch.cuda.device_count())


def _kernels(settings: WorkerSettings, model: Path) -> KernelSet:
    """The ops of the device, with attention for this model."""
    device = settings.device
    case = attention_case(model, device, settings.dtype, settings.block_size)
    case = replace(case, cache_dtype=CACHE_DTYPES[settings.kv_cache_dtype])
    return load_kernels(
        device,
        attention_backend=settings.attention_backend,
        case=case,
        linear_backend=settings.linear_backend,
    )


def _all_know(memo: bytes, tp: TensorParallel) -> bool:
    """Whether every rank has a memo: the ranks rehearse together or not at all."""
    return int(tp.all_reduce(torch.tensor([int(bool(memo))])).item()) == tp.size


def _rehearse(built: Built) -> None:
    """Measure the steps of a rank that drafts, and see whether its drafter is any good."""
    if not built.facts.max_draft_tokens:
        return
    built.facts.costs.CopyFrom(measure_costs(built.runner))
    check = check_drafter(built.runner)
    built.facts.check_drafts, built.facts.check_accepted = check
    if not check.drafts:
        return
    level = logging.WARNING if check.accepted < _CHECK_FLOOR * check.drafts else logging.INFO
    logger.log(level, "drafter check: %d of %d drafts accepted", check.accepted, check.drafts)


def _share_of_cores(settings: WorkerSettings) -> int:
    """Cores this process may run on, shared among the ranks."""
    return max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)


def assemble(
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
    heartbeat: Heartbeat | None = None,
) -> Built:
    """A runner around a loaded model."""
    config, speculation = model.config, _speculation(settings)
    max_model_len = settings.max_model_len or config.max_length
    max_drafts = speculation.num_speculative_tokens if speculation is not None else 0
    kv = _allocate_kv(settings, model, kernels, max_model_len)
    caches = Caches(kv, _allocate_recurrent(settings, model, max_drafts))
    slots = Slots(settings.max_num_seqs, max_model_len, max_drafts, settings.block_size)
    sampling = SamplingSlots(settings.max_num_seqs, config.vocab_size)
    target = Target(model, caches, slots, sampling, tp, kernels)
    drafter = _drafter(speculation, target)
    parts = Parts(
        model=model,
        caches=caches,
        slots=slots,
        sampling=sampling,
        drafter=drafter,
        max_draft_tokens=max_drafts,
        tp=tp,
        device=torch.device(settings.device),
        heartbeat=heartbeat or Heartbeat.unseen(),
        step_ops=kernels.step,
        use_graphs=not settings.enforce_eager,
        max_step_tokens=settings.max_num_batched_tokens,
        compilations=kernels.compilations,
    )
    recurrent = caches.recurrent
    facts = pb.WorkerInfo(
        model_path=str(settings.model),
        architecture=config.architecture,
        dtype=str(kv.spec.dtype).removeprefix("torch."),
        device=settings.device,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_slots=settings.max_num_seqs,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=settings.max_num_batched_tokens,
        drafter=speculation.method if speculation is not None else "",
        max_draft_tokens=max_drafts,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=model.weight_bytes,
        kv_cache_bytes=kv.num_blocks * bytes_per_block(kv.spec, kernels),
        drafter_has_state=isinstance(drafter, StatefulDrafter),
        recurrent=recurrent is not None,
        num_snapshots=recurrent.num_snapshots if recurrent is not None else 0,
        state_bytes_per_slot=recurrent.slot_bytes if recurrent is not None else 0,
    )
    _log_facts(facts)
    return Built(Runner(parts), facts)


def _allocate_kv(
    settings: WorkerSettings, model: Model, kernels: KernelSet, max_model_len: int
) -> KVCache:
    """Blocks for the memory given, but no more than all slots at full length could use."""
    cache_dtype = CACHE_DTYPES[settings.kv_cache_dtype]
    spec = replace(model.kv_spec(settings.block_size), cache_dtype=cache_dtype)
    if cache_dtype is not None:
        logger.info("KV cache of %s, not scaled", cache_dtype)
    fit = blocks_that_fit(int(settings.kv_cache_memory * _GIB), spec, kernels)
    useful = 1 + settings.max_num_seqs * -(-max_model_len // settings.block_size)
    return KVCache(spec, min(fit, useful), kernels, settings.device)


def _allocate_recurrent(
    settings: WorkerSettings, model: Model, max_drafts: int
) -> RecurrentCache | None:
    """A state and the records of a window per slot, and snapshots for the memory given."""
    spec = model.recurrent_spec()
    if spec is None:
        return None
    budget = int(settings.snapshot_memory * _GIB) // spec.snapshot_bytes
    useful = _SNAPSHOTS_PER_SLOT * settings.max_num_seqs
    return RecurrentCache(
        spec,
        num_slots=settings.max_num_seqs,
        window=max_drafts + 1,
        num_snapshots=min(budget, useful),
        device=settings.device,
    )


def _speculation(settings: WorkerSettings) -> SpeculativeConfig | None:
    """How this rank drafts; None if it does not."""
    if settings.speculative_config is None:
        return None
    config = SpeculativeConfig.from_json(json.dumps(settings.speculative_config))
    return config if config.num_speculative_tokens else None


def _drafter(config: SpeculativeConfig | None, target: Target) -> Drafter | None:
    return DRAFTERS.get(config.method)(config, target) if config is not None else None


def _show_progress(heartbeat: Heartbeat) -> Progress:
    """Log every tenth of the checkpoint; whoever starts the worker shows a bar from these lines."""
    logged = -1.0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        heartbeat.progress(pb.LOADING)
        share = done / total
        if share - logged >= _PROGRESS_STEP or (done == total and logged < 1):
            logged = share
            logger.info("loading weights: %d of %d MB", done >> 20, max(total >> 20, 1))

    return progress


def _log_facts(facts: pb.WorkerInfo) -> None:
    logger.info(
        "%s, %s on %s: %d slots, %d KV blocks of %d tokens (%.2f GiB), drafter %s, K = %d",
        facts.architecture,
        facts.dtype,
        facts.device,
        facts.num_slots,
        facts.num_blocks,
        facts.block_size,
        facts.kv_cache_bytes / _GIB,
        facts.drafter or "none",
        facts.max_draft_tokens,
    )
    if facts.recurrent:
        logger.info(
            "recurrent state: %.2f MiB per slot (1 state, %d records), %d snapshots",
            facts.state_bytes_per_slot / _MIB,
            facts.max_draft_tokens + 1,
            facts.num_snapshots,
        )
