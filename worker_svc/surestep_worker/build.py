"""Puts a rank together from its settings. Imports torch; runs on the step thread."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_proto import engine_pb2 as pb

from .build_log import log_facts, show_progress
from .cache_budget import CacheBudget
from .caches import Caches
from .config import WorkerSettings
from .generation_config import sampling_defaults
from .heartbeat import Heartbeat
from .kv_cache import CACHE_DTYPES, bytes_per_block
from .models import Model, ModelSource, attention_case, check_alike, load_model
from .models.finite import non_finite_tensors
from .models.weight_schemes import Fp8
from .models.weight_store import WeightStore
from .parts import Parts
from .pooling import PoolingSums
from .rehearsal import check_drafter, measure_costs, output_is_finite
from .runner import Runner
from .sampling import SamplingSlots
from .slots import Slots
from .spec import DRAFTERS, Drafter, StatefulDrafter, Target
from .spec.config import SpeculativeConfig
from .tp import TensorParallel

logger = logging.getLogger(__name__)

_TP_TIMEOUT_S = 60.0  # a rank that does not arrive at a collective; step deadlines are far shorter
_CHECK_FLOOR = 0.05  # share of drafts: a sound head reaches several times as much on any text


class Built(NamedTuple):
    """A runner ready for its first epoch, and the facts the Worker service reports of it."""

    runner: Runner
    facts: pb.WorkerInfo
    checkpoint: str = ""  # its fingerprint

    @property
    def memo(self) -> bytes:
        """What was measured and decided: for the rank that comes after this one."""
        facts = self.facts
        return pb.WorkerInfo(
            costs=facts.costs,
            check_drafts=facts.check_drafts,
            check_accepted=facts.check_accepted,
            num_blocks=facts.num_blocks,
            num_snapshots=facts.num_snapshots,
        ).SerializeToString()


def build_runner(
    settings: WorkerSettings,
    heartbeat: Heartbeat | None = None,
    weights_fd: int | None = None,
    memo: bytes = b"",
) -> Built:
    """Load the model and allocate everything a rank needs.

    What the `memo` of an earlier rank tells is not measured again. Raises InvalidRequest for
    settings the model cannot serve, for a model that is broken, and for memory that does not
    suffice.
    """
    heartbeat = heartbeat or Heartbeat.unseen()
    heartbeat.progress(pb.LOADING)
    if settings.model is None:
        raise InvalidRequest("no model folder given", param="model")
    speculation = _speculation(settings)
    if settings.dtype == "float16":
        logger.warning("--dtype float16: computing in bfloat16, which has its size and more range")
    _take_gpu(settings)
    store = WeightStore(weights_fd) if weights_fd is not None else None
    source = ModelSource(settings.model, store, settings.generation_folder)
    defaults = sampling_defaults(
        source.generation, settings.generation_config, settings.override_generation_config or {}
    )
    kernels = _kernels(settings, source)
    kernels.set_num_threads(settings.cpu_threads or _share_of_cores(settings))
    tp = TensorParallel.connect(
        settings.rank,
        settings.tensor_parallel_size,
        settings.tp_master,
        settings.device,
        _TP_TIMEOUT_S,
    )
    check_alike(source, tp)
    known = pb.WorkerInfo.FromString(memo) if _all_know(memo, tp) else None
    model = load_model(
        source,
        dtype=settings.dtype,
        device=settings.device,
        tp=tp,
        kernels=kernels,
        max_model_len=settings.max_model_len,
        mtp=speculation is not None and speculation.method == "mtp",
        expert_parallel=settings.enable_expert_parallel,
        progress=show_progress(heartbeat),
    )
    built = assemble(settings, model, tp, kernels, heartbeat, known)
    built.facts.model_fingerprint = _voice(source, settings, built.facts)
    built.facts.defaults.CopyFrom(defaults)
    heartbeat.progress(pb.WARMING_UP)
    built.runner.prepare()
    if known is not None:
        built.facts.MergeFrom(known)
    else:
        _check_logits(built, source, heartbeat)
        _rehearse(built)
    kernels.compilations.serve()
    return built._replace(checkpoint=source.fingerprint)


def _voice(source: ModelSource, settings: WorkerSettings, facts: pb.WorkerInfo) -> str:
    """The fingerprint of the checkpoint, and of which kind the numbers are that it computes."""
    cache_dtype = CACHE_DTYPES[settings.kv_cache_dtype]
    kinds = [facts.dtype, str(cache_dtype).removeprefix("torch.") if cache_dtype else facts.dtype]
    if settings.activation_dtype != "auto":
        kinds.append(f"{settings.activation_dtype}_activations")
    return "-".join((source.fingerprint, *kinds))


def _check_logits(built: Built, source: ModelSource, heartbeat: Heartbeat) -> None:
    """Raise InvalidRequest, naming the tensors at fault, when the model computes no numbers."""
    tp = built.runner.parts.tp
    if bool(tp.broadcast(torch.tensor([output_is_finite(built.runner)])).item()):
        return
    broken = non_finite_tensors(source.entries, lambda: heartbeat.progress(pb.LOADING))
    reason = "; ".join(broken) or "although every weight that could be read is"
    what = "logits" if built.runner.parts.model.has_head else "hidden states"
    raise InvalidRequest(f"the model's {what} are not finite: {reason}", param="model")


def _take_gpu(settings: WorkerSettings) -> None:
    """What "cuda" means on this thread from here on: the GPU that is this rank's."""
    if settings.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise InvalidRequest("there is no CUDA device here", param="device")
    torch.cuda.set_device(settings.rank % torch.cuda.device_count())


def _kernels(settings: WorkerSettings, source: ModelSource) -> KernelSet:
    """The ops of the device, with attention for this model: those that weights in memory are laid
    out for, otherwise the fastest."""
    device, store = settings.device, source.store
    if settings.activation_dtype != "auto" and not isinstance(source.config.quantization, Fp8):
        raise InvalidRequest(
            f"activation_dtype {settings.activation_dtype}: the checkpoint has no FP8 weights",
            param="activation_dtype",
        )
    case = attention_case(source, device, settings.dtype, settings.block_size)
    case = replace(case, cache_dtype=CACHE_DTYPES[settings.kv_cache_dtype])
    return load_kernels(
        device,
        cpu_kernels="reference" if store.sealed and not store.kernels else "auto",
        attention_backend=settings.attention_backend,
        case=case,
        linear_backend=settings.linear_backend,
        code=store.kernels,
        activation_dtype=settings.activation_dtype,
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
    known: pb.WorkerInfo | None = None,
) -> Built:
    """A runner around a loaded model. `known` tells the sizes of an earlier rank's caches."""
    config, speculation = model.config, _speculation(settings)
    max_model_len = settings.max_model_len or config.max_length
    max_drafts = speculation.num_speculative_tokens if speculation is not None else 0
    caches = CacheBudget(settings, tp, known).allocate(model, kernels, max_model_len, max_drafts)
    slots = _slots(settings, caches, kernels, max_model_len, max_drafts)
    sampling = SamplingSlots(settings.max_num_seqs, config.vocab_size)
    target = Target(model, caches, slots, sampling, tp, kernels)
    drafter, device = _drafter(speculation, target), torch.device(settings.device)
    parts = Parts(
        model=model,
        caches=caches,
        slots=slots,
        sampling=sampling,
        pooling=PoolingSums(slots.num_slots, config.hidden_size, model.hidden_bound, device),
        drafter=drafter,
        max_draft_tokens=max_drafts,
        tp=tp,
        device=device,
        heartbeat=heartbeat or Heartbeat.unseen(),
        step_ops=kernels.step,
        use_graphs=not settings.enforce_eager,
        max_step_tokens=settings.max_num_batched_tokens,
        compilations=kernels.compilations,
    )
    kv, recurrent = caches.kv, caches.recurrent
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
        hidden_size=config.hidden_size,
        headless=not model.has_head,
        prompt_chunk=slots.prompt_chunk,
    )
    log_facts(facts)
    return Built(Runner(parts), facts)


def _slots(
    settings: WorkerSettings,
    caches: Caches,
    kernels: KernelSet,
    max_model_len: int,
    max_drafts: int,
) -> Slots:
    """Recurrent layers take prompts in chunks, where kernels do; those are too coarse for fp32."""
    recurrent = caches.recurrent
    in_chunks = recurrent is not None and recurrent.spec.dtype is not torch.float32
    sizes = settings.max_num_seqs, max_model_len, max_drafts, settings.block_size
    return Slots(*sizes, kernels.delta_chunk if in_chunks else 1)


def _speculation(settings: WorkerSettings) -> SpeculativeConfig | None:
    """How this rank drafts; None if it does not."""
    if settings.speculative_config is None:
        return None
    config = SpeculativeConfig.from_json(json.dumps(settings.speculative_config))
    return config if config.num_speculative_tokens else None


def _drafter(config: SpeculativeConfig | None, target: Target) -> Drafter | None:
    if config is None:
        return None
    if not target.model.has_head:
        message = "the model has no output head: there is nothing to draft"
        raise InvalidRequest(message, param="speculative_config")
    return DRAFTERS.get(config.method)(config, target)
