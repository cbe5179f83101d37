"""Choose the kernels of a rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from surestep_common.errors import InvalidRequest
from surestep_kernels import AttentionCase, KernelSet, attention_for, load_kernels
from surestep_kernels.linear import FP8, ROUNDINGS, Rounding

from surestep_worker.adapters.kernels import with_adapters
from surestep_worker.cache.kv_cache import CACHE_DTYPES
from surestep_worker.checkpoint.formats import Fp8
from surestep_worker.config import WorkerSettings
from surestep_worker.configs.wanted_quantization import rounding_wanted
from surestep_worker.models import ModelSource, attention_case
from surestep_worker.step.runner import StepThreads


def choose_kernels(settings: WorkerSettings, source: ModelSource) -> KernelSet:
    """Return the ops of the device, with attention for this model: those that the weights in memory
    are laid out for, otherwise the fastest."""
    device, store = settings.device, source.store
    quantization = source.config.quantization
    held = quantization is not None and any(isinstance(f, Fp8) for f in quantization.formats)
    if settings.activation_dtype != "auto" and not (
        held or choose_rounding(settings, source) == FP8
    ):
        raise InvalidRequest(
            f"activation_dtype {settings.activation_dtype}: the checkpoint has no FP8 weights",
            param="activation_dtype",
        )
    case = _attention_case(settings, source, settings.dtype)
    kernels = load_kernels(
        device,
        cpu_kernels="reference" if store.sealed and not store.kernels else "auto",
        attention_backend=settings.attention_backend,
        case=case,
        linear_backend=settings.linear_backend,
        code=store.kernels,
        activation_dtype=settings.activation_dtype,
        allow_slow=settings.allow_slow,
    )
    if device == "cuda":
        _choose_launches(settings)
    kernels.set_num_threads(settings.cpu_threads or _share_of_cores(settings))
    return with_adapters(kernels) if settings.enable_lora else kernels


def check_attention(settings: WorkerSettings, draft: ModelSource, dtype: str) -> None:
    """Raise InvalidRequest if this rank's attention is none for a draft model in a dtype."""
    case = _attention_case(settings, draft, dtype)
    attention_for(settings.device, settings.attention_backend, case)


def _attention_case(settings: WorkerSettings, source: ModelSource, dtype: str) -> AttentionCase:
    case = attention_case(source, settings.device, dtype, settings.block_size)
    return replace(case, cache_dtype=CACHE_DTYPES[settings.kv_cache_dtype])


def step_threads(
    settings: WorkerSettings, kernels: KernelSet
) -> Callable[[int], AbstractContextManager[None]]:
    """Return what gives a step of so many tokens its threads, unless their number is settled."""
    if settings.device != "cpu" or settings.cpu_threads:
        return lambda num_tokens: nullcontext()
    return StepThreads(_share_of_cores(settings), kernels.set_num_threads).of_step


def choose_rounding(settings: WorkerSettings, source: ModelSource) -> Rounding | None:
    """Return what linear weights are rounded to; None: they are served as they are stored."""
    wanted = rounding_wanted(settings.quantization, source.quant_method, settings.device)
    return None if wanted is None else ROUNDINGS[wanted]


def _choose_launches(settings: WorkerSettings) -> None:
    """Set the launch mode of the whole process, before the first launch."""
    from surestep_kernels.columns.gpu.dependent_launch import use_dependent_launches

    use_dependent_launches(enabled=settings.programmatic_dependent_launch)


def _share_of_cores(settings: WorkerSettings) -> int:
    """Return the cores this process may run on, divided by the ranks of all models here."""
    ranks = settings.tensor_parallel_size * settings.models_here
    return max(1, len(os.sched_getaffinity(0)) // ranks)
