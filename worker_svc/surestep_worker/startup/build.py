"""Build a rank from its settings. Imports torch; runs on the step thread."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_proto import supervisor_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.adapters.kernels import plain_kernels
from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.held_caches import IDENTITY_BYTES
from surestep_worker.cache.kv_cache import CACHE_DTYPES, bytes_per_block
from surestep_worker.checkpoint.held_weights import WeightFds
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.config import WorkerSettings
from surestep_worker.configs.generation_config import sampling_defaults
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DeviceDrafter, DraftContext
from surestep_worker.drafters.ngram import RecentAnswers
from surestep_worker.layers.pooling import PoolingSums
from surestep_worker.models import Model, ModelSource, check_alike, load_model
from surestep_worker.step.heartbeat import Heartbeat
from surestep_worker.step.runner import Runner
from surestep_worker.step.sampling import SamplingTable
from surestep_worker.step.slots import Slots
from surestep_worker.step.step import RankContext

from .adapters import adapter_pool
from .built import Built, facts_of, log_facts, show_progress
from .cache_budget import MIN_CACHE_SIZES, CacheBudget, CacheSizes, allocate
from .choose_kernels import choose_kernels, choose_rounding, step_threads
from .gpu_memory_profiler import GpuMemoryProfiler, claim_gpu
from .grammars import grammar_table, most_forced
from .products import choose_products
from .speculation import (
    Speculation,
    attach_draft_head,
    choose_speculation,
    make_drafter,
    speculation_asked,
)
from .tiers import check_host, check_tiers, open_tiers
from .try_out import try_again, try_out

logger = logging.getLogger(__name__)

_JOIN_S = 60.0  # in which a group of ranks is complete
_COLLECTIVE_S = 60.0  # in which each joins, once they serve; step deadlines are far shorter


def build_runner(
    settings: WorkerSettings,
    heartbeat: Heartbeat | None = None,
    weights: WeightFds | None = None,
    profile_result: bytes = b"",
) -> Built:
    """Load the model and allocate everything a rank needs.

    What the `profile_result` of an earlier rank contains is not measured again. Raises
    InvalidRequest for settings that the model cannot serve, for a broken model, and if there is not
    enough memory.
    """
    heartbeat = heartbeat or Heartbeat.local()
    heartbeat.progress(supervisor_pb2.LOADING)
    if settings.dtype == "float16":
        logger.warning(
            "--dtype float16: computing in bfloat16, which has the same size and more range"
        )
    gpu = claim_gpu(settings, profile_result)
    source = _open(settings, weights)
    given = settings.generation_config, settings.override_generation_config or {}
    defaults = sampling_defaults(source.generation, *given)
    kernels = choose_kernels(settings, source)
    tp = _connect(settings, heartbeat)
    check_alike(source, tp)
    known = pb.ProfileResult.FromString(profile_result) if _all(bool(profile_result), tp) else None
    held = _all(source.store.sealed, tp)
    speculation = choose_speculation(settings, source, tp, known)
    model = _load(settings, speculation, source, tp, kernels, heartbeat)
    if kernels.step.synchronous and known is None and not settings.allow_batch_variance:
        model.rehearse()
    head = WeightStore(weights.draft_head) if weights is not None else None
    fault = attach_draft_head(settings, speculation, model, tp, plain_kernels(kernels), known, head)
    choose_products(kernels, tp, torch.device(settings.device), heartbeat, known)
    memory = _cache_memory(settings, weights, known)
    kept = speculation, memory, adapter_pool(settings, model, kernels, weights)

    def build(sizes: CacheSizes) -> Built:
        return assemble(settings, model, tp, kernels, heartbeat, sizes, *kept)

    if known is not None:
        sizes = CacheSizes(known.num_blocks, known.num_snapshots)
    else:
        left = gpu.measure(lambda: build(MIN_CACHE_SIZES).runner, tp) if gpu is not None else None
        sizes = _sizes(settings, speculation, model, tp, kernels, left)
    started = partial(start, build, sizes, gpu)
    if known is not None:
        built = _as_before(started(), known, source, held=held)
    else:
        built = try_out(started, source, speculation, require_drafter=settings.require_drafter)
        if gpu is not None:
            built.facts.memory.CopyFrom(gpu.report(_cache_bytes(built)))
    built.facts.drafter_fault = built.facts.drafter_fault or fault
    built.facts.model_fingerprint = _model_fingerprint(source, settings, built.facts)
    built.facts.defaults.CopyFrom(defaults)
    _find_kept(built)
    open_tiers(built, settings, kernels)
    log_facts(built.facts)
    begin_to_serve(built.runner.context)
    tp.bound(_COLLECTIVE_S)
    return built._replace(checkpoint=source.fingerprint)


def _as_before(built: Built, known: pb.ProfileResult, source: ModelSource, *, held: bool) -> Built:
    """Add what an earlier rank found out. Steps cost as much with weights that were not held, but
    their outcome may be another.
    """
    built.facts.MergeFrom(facts_of(known))
    if not held:
        try_again(built, source)
    return built


def start(
    build: Callable[[CacheSizes], Built], sizes: CacheSizes, gpu: GpuMemoryProfiler | None
) -> Built:
    """Build a rank that can step; on a GPU one that was tried before has given up its memory then.

    Captured steps are part of cycles, which hold caches of all the memory there is.
    """
    if gpu is not None:
        gpu.release()
    built = build(sizes)
    built.runner.prepare()
    return built


def begin_to_serve(context: RankContext) -> None:
    """Tell the parts of a rank that it has been tried out."""
    context.compilations.serve(context.heartbeat)
    if isinstance(context.drafter, DeviceDrafter):
        context.drafter.serve()


def _open(settings: WorkerSettings, weights: WeightFds | None) -> ModelSource:
    """Open the model, or what an earlier rank left of it in memory."""
    if settings.model is None:
        raise InvalidRequest("no model folder given", param="model")
    check_tiers(settings)
    store, update = None, None
    if weights is not None:
        store = WeightStore(weights.model)
        if os.fstat(weights.update).st_size:
            update = Path(f"/proc/self/fd/{weights.update}")
    return ModelSource(settings.model, store, settings.replacements, settings.model_impl, update)


def _cache_memory(
    settings: WorkerSettings, fds: WeightFds | None, known: pb.ProfileResult | None
) -> CacheMemory | None:
    """Return the memory for caches that outlive the rank; None: none does, as on a GPU."""
    if fds is None or settings.device != "cpu":
        return None
    memory = CacheMemory(fds.caches)
    if known is None:  # steps are tried in it before it serves
        memory.clear()
    return memory


def _find_kept(built: Built) -> None:
    """Add to the facts what an earlier rank of the same model and sizes has left whole."""
    context, facts = built.runner.context, built.facts
    kv, recurrent, held = context.caches.kv, context.caches.recurrent, context.caches.held
    if held is None:
        return
    model = facts.model_fingerprint, facts.speculative_config, list(facts.draft_layers)
    states = (recurrent.spec, recurrent.num_snapshots) if recurrent is not None else ()
    shapes = [tuple(page.shape) for layer in kv.layers for page in layer.pages]
    about = repr((model, context.tp.rank, context.tp.size, kv.spec, states, shapes))
    identity = hashlib.blake2b(about.encode(), digest_size=IDENTITY_BYTES).digest()
    kept = held.verify(identity)
    if kept is not None:
        facts.kept.CopyFrom(kept)


def _connect(settings: WorkerSettings, heartbeat: Heartbeat) -> TensorParallel:
    """Join the other ranks, each of which may load for as long as this one."""
    heartbeat.progress(supervisor_pb2.LOADING, 2 * _JOIN_S)  # NCCL's beginning has no limit
    group = settings.rank, settings.tensor_parallel_size, settings.tp_master
    tp = TensorParallel.connect(*group, settings.device, _JOIN_S)
    tp.bound(settings.load_timeout_s)
    heartbeat.progress(supervisor_pb2.LOADING)
    return tp


def _load(
    settings: WorkerSettings,
    speculation: Speculation,
    source: ModelSource,
    tp: TensorParallel,
    kernels: KernelSet,
    heartbeat: Heartbeat,
) -> Model:
    rounding = choose_rounding(settings, source)
    if rounding is not None:
        logger.info("linear weights are rounded to %s", settings.quantization)

    def load(*, draft_head: bool) -> Model:
        return load_model(
            source,
            dtype=settings.dtype,
            device=settings.device,
            tp=tp,
            kernels=kernels,
            max_model_len=settings.max_model_len,
            draft_head=draft_head,
            expert_parallel=settings.enable_expert_parallel,
            rounding=rounding,
            progress=show_progress(heartbeat),
        )

    try:
        return load(draft_head=speculation.uses_own_head)
    except InvalidRequest as error:
        if not (speculation.uses_own_head and speculation.because):
            raise
        logger.warning("%s; loading the model without its MTP head", error.message)
        return load(draft_head=False)


def _model_fingerprint(source: ModelSource, settings: WorkerSettings, facts: pb.WorkerInfo) -> str:
    """Return the fingerprint of the checkpoint and of the number formats it is computed in."""
    cache_dtype = CACHE_DTYPES[settings.kv_cache_dtype]
    kinds = [facts.dtype, str(cache_dtype).removeprefix("torch.") if cache_dtype else facts.dtype]
    if settings.activation_dtype != "auto":
        kinds.append(f"{settings.activation_dtype}_activations")
    if choose_rounding(settings, source) is not None:
        kinds.append(f"{settings.quantization}_weights")
    return "-".join((source.fingerprint, *kinds))


def _cache_bytes(built: Built) -> int:
    """Return the bytes of KV blocks and snapshots."""
    recurrent = built.runner.context.caches.recurrent
    snapshots = recurrent.num_snapshots * recurrent.spec.snapshot_bytes if recurrent else 0
    return built.facts.kv_cache_bytes + snapshots


def _all(mine: bool, tp: TensorParallel) -> bool:
    """Return whether it is so on every rank: the ranks profile together or not at all."""
    return int(tp.all_reduce(torch.tensor([int(mine)])).item()) == tp.size


def assemble(
    settings: WorkerSettings,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
    heartbeat: Heartbeat | None = None,
    sizes: CacheSizes | None = None,
    speculation: Speculation | None = None,
    memory: CacheMemory | None = None,
    adapters: AdapterPool | None = None,
) -> Built:
    """Build a runner around a loaded model, with caches of these sizes, or as large as memory
    allows, that drafts like this, or as the settings ask for."""
    wanted = speculation_asked(settings) if speculation is None else speculation
    config, speculation = model.config, wanted.of(model)
    most_drafts = max(max_drafts := speculation.max_drafts, most_forced(model, kernels))
    if sizes is None:
        sizes = _sizes(settings, speculation, model, tp, kernels)
    caches = allocate(settings, model, kernels, sizes, max_drafts + 1, memory)
    slots = _slots(settings, caches, kernels, config.max_position, most_drafts)
    sampling = SamplingTable(settings.max_num_seqs, config.vocab_size)
    device, head = torch.device(settings.device), model.draft_head
    looks_up = kernels.step.synchronous and speculation.looks_up
    recent = RecentAnswers(settings.max_num_seqs) if looks_up else None
    for_drafter = DraftContext(
        model,
        caches,
        slots.num_slots,
        sampling.draws,
        tp,
        kernels,
        device,
        max_drafts,
        reads_freely=kernels.step.synchronous,
        recent=recent,
    )
    drafter = make_drafter(speculation.config, for_drafter)
    capturable = model.capturable and (head is None or head.capturable)
    context = RankContext(
        model=model,
        caches=caches,
        slots=slots,
        sampling=sampling,
        grammars=grammar_table(settings, model, tp),
        pooling=PoolingSums(slots.num_slots, config.hidden_size, model.hidden_bound, device),
        drafter=drafter,
        recent=recent,
        max_draft_tokens=max_drafts,
        most_drafts=most_drafts,
        tp=tp,
        device=device,
        heartbeat=heartbeat or Heartbeat.local(),
        step_ops=kernels.step,
        use_graphs=not settings.enforce_eager and capturable,
        max_step_tokens=settings.max_step_tokens,
        compilations=kernels.compilations,
        threads=step_threads(settings, kernels),
        adapters=adapters,
    )
    return Built(Runner(context), _facts(settings, speculation, context, kernels))


def _facts(
    settings: WorkerSettings, speculation: Speculation, context: RankContext, kernels: KernelSet
) -> pb.WorkerInfo:
    """Return the facts that are neither measured nor read from the checkpoint's files."""
    model, kv, recurrent = context.model, context.caches.kv, context.caches.recurrent
    states = [cache for cache in (recurrent, context.caches.draft) if cache is not None]
    return pb.WorkerInfo(
        model_path=str(settings.model),
        architecture=model.config.architecture,
        dtype=str(kv.spec.dtype).removeprefix("torch."),
        device=settings.device,
        vocab_size=model.config.vocab_size,
        max_model_len=settings.max_model_len or model.config.max_position,
        num_slots=settings.max_num_seqs,
        num_blocks=kv.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=settings.max_step_tokens,
        drafter=speculation.method,
        speculative_config=speculation.text,
        drafts_because=speculation.because,
        max_draft_tokens=context.max_draft_tokens,
        max_forced_drafts=context.most_drafts if context.reads_freely else 0,
        grammar_fault=context.grammars.fault,
        eos_token_ids=model.config.eos_token_ids,
        weight_bytes=model.weight_bytes,
        kv_cache_bytes=kv.num_blocks * bytes_per_block(kv.spec, kernels),
        drafter_has_state=isinstance(context.drafter, DeviceDrafter),
        drafter_looks_up=context.recent is not None,
        drafter_recurrent=context.caches.draft is not None,
        recurrent=recurrent is not None,
        num_snapshots=recurrent.num_snapshots if recurrent is not None else 0,
        state_bytes_per_slot=sum(cache.slot_bytes for cache in states),
        hidden_size=model.config.hidden_size,
        headless=not model.has_head,
        prompt_chunk=context.slots.prompt_chunk,
        kv_windows=kv.layout.windows,
        max_loras=settings.max_loras if context.adapters is not None else 0,
        max_lora_rank=settings.max_lora_rank if context.adapters is not None else 0,
        linear_backend=kernels.linear_backend,
        programmatic_dependent_launch=settings.device == "cuda"
        and settings.programmatic_dependent_launch,
    )


def _sizes(
    settings: WorkerSettings,
    speculation: Speculation,
    model: Model,
    tp: TensorParallel,
    kernels: KernelSet,
    left: int | None = None,
) -> CacheSizes:
    """Return the sizes of the caches; `left` bytes were measured to be available for them."""
    check_host(settings)
    max_drafts = speculation.of(model).max_drafts
    max_model_len = settings.max_model_len or model.config.max_position
    return CacheBudget(settings, tp, left).sizes(model, kernels, max_model_len, max_drafts)


def _slots(
    settings: WorkerSettings,
    caches: Caches,
    kernels: KernelSet,
    max_position: int,
    max_drafts: int,
) -> Slots:
    """Build the slots. Recurrent layers compute prompts in chunks if the kernels do, except in
    fp32, for which chunks are too imprecise."""
    recurrent = caches.recurrent
    in_chunks = recurrent is not None and recurrent.spec.dtype is not torch.float32
    max_model_len = settings.max_model_len or max_position
    sizes = settings.max_num_seqs, max_model_len, max_drafts, settings.block_size
    windows = caches.kv.layout.windows
    return Slots(*sizes, kernels.delta_chunk if in_chunks else 1, windows)
