"""Attention backends: which exist, what each cannot do, and which one is used.

A backend is three ops that belong together, because one writes what the other reads. Its factory
raises InvalidRequest, with the reason, for a case it does not support.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from surestep_common.errors import InvalidRequest
from surestep_common.registry import Registry

from surestep_kernels.store_kv import kv_cache_shape, store_kv_reference

from .case import AttentionBackend, AttentionCase, refuse
from .reference import paged_attention_reference

logger = logging.getLogger(__name__)

AUTO = ("flash_attn", "torch_varlen", "triton", "torch")  # the first that supports the case is used
_TRITON_BLOCK_MULTIPLE = 8
_NATIVE_FP8 = 89  # compute capability from which an instruction converts E4M3


ATTENTION: Registry[AttentionBackend] = Registry("attention_backend")


def choose_attention(name: str, case: AttentionCase) -> AttentionBackend:
    """Return the named backend, or for "auto" the first of AUTO that supports the case, and log it.

    A backend chosen by name is used as it is: `invariant` is required only by "auto". Raises
    InvalidRequest, with the reason, if the named backend does not support the case.
    """
    if name != "auto":
        backend = ATTENTION.get(name)(replace(case, invariant=False))
        logger.info("attention: %s, as requested", backend.name)
        return backend
    passed_over = []
    for candidate in AUTO:
        try:
            backend = ATTENTION.get(candidate)(case)
        except InvalidRequest as error:
            passed_over.append(error.message)
            continue
        logger.info("attention: %s; %s", backend.name, "; ".join(passed_over) or "the first choice")
        return backend
    raise AssertionError("torch serves every case")


@ATTENTION.register("torch")
def _torch(case: AttentionCase) -> AttentionBackend:
    return AttentionBackend("torch", kv_cache_shape, store_kv_reference, paged_attention_reference)


@ATTENTION.register("triton")
def _triton(case: AttentionCase) -> AttentionBackend:
    try:
        from triton import knobs

        from surestep_kernels.store_kv.triton import store_kv

        from .triton import paged_attention
    except ImportError as error:
        raise refuse("triton", f"the package triton is not installed: {error}") from error
    if case.device == "cpu" and not knobs.runtime.interpret:
        raise refuse("triton", "on a cpu it runs in its interpreter only, with TRITON_INTERPRET=1")
    if case.block_size % _TRITON_BLOCK_MULTIPLE:
        raise refuse("triton", f"block size {case.block_size} is no multiple of 8")
    if case.int8:
        raise refuse("triton", "it has no INT8 cache")
    if case.fp8 and 0 < case.capability < _NATIVE_FP8:
        raise refuse("triton", f"an FP8 cache needs sm_{_NATIVE_FP8}, this is sm_{case.capability}")
    return AttentionBackend("triton", kv_cache_shape, store_kv, paged_attention)


@ATTENTION.register("flash_attn")
def _flash_attn(case: AttentionCase) -> AttentionBackend:
    from .flash import flash_attn

    return flash_attn(case)


@ATTENTION.register("torch_varlen")
def _torch_varlen(case: AttentionCase) -> AttentionBackend:
    from .flash import torch_varlen

    return torch_varlen(case)
