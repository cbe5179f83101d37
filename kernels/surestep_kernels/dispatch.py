"""Choose the implementation of each op: once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from surestep_common.errors import InvalidRequest

from surestep_kernels.paged_attention.backends import choose_attention

from .cpu import load_cpu, moe_of
from .linear import with_rounded_rows
from .paged_attention import AttentionBackend, AttentionCase, refuse_int8
from .paged_attention.cpu import refuse_unsupported
from .table import REFERENCE, KernelSet

logger = logging.getLogger(__name__)


def load_kernels(
    device: str,
    cpu_kernels: Literal["auto", "reference"] = "auto",
    attention_backend: str = "auto",
    case: AttentionCase | None = None,
    linear_backend: str = "auto",
    code: bytes = b"",
    activation_dtype: str = "auto",
    *,
    allow_slow: bool = False,
) -> KernelSet:
    """Return the fastest kernels that run on `device` ("cpu", "cuda" or "cuda:0").

    On the CPU the C kernels are compiled on first use, unless their `code` is given or they were
    compiled ahead. They run on one thread until `set_num_threads` is called. The torch references
    serve with cpu_kernels="reference", and with `allow_slow` where there can be no C kernels.

    The attention backend is chosen for `case`, which may be left at its defaults; "auto" on the CPU
    is the one that comes with the other kernels. The linear backend chooses the products with
    unquantised weights on CUDA (see Products).
    With the activation dtype "fp8", inputs of FP8 weights are rounded to FP8 (see fp8_rows.py).
    Raises InvalidRequest if a backend does not support the case, or without kernels.
    """
    kernels = REFERENCE
    if device == "cpu" and cpu_kernels == "auto":
        kernels = load_cpu(code, allow_slow=allow_slow)
    elif device.startswith("cuda"):
        from surestep_kernels.columns.gpu.compilations import check_kernel_cache

        check_kernel_cache()
        kernels = load_triton(linear_backend, activation_dtype)
    if device == "cpu" and linear_backend != "auto":
        raise InvalidRequest("a cpu has one linear backend", param="linear_backend")
    if device == "cpu" and activation_dtype == "fp8":
        linear = with_rounded_rows(kernels.linear)
        activations = kernels.silu_and_mul, kernels.clamped_swiglu, kernels.add_adapters
        kernels = replace(kernels, linear=linear, moe=moe_of(linear, *activations))
    logger.info("kernels for %s: %s", device, kernels.name)
    backend = attention_for(device, attention_backend, case or AttentionCase.on(device))
    if backend is None:
        return kernels
    return replace(
        kernels,
        kv_cache_shape=backend.kv_cache_shape,
        store_kv=backend.store_kv,
        paged_attention=backend.paged_attention,
    )


def attention_for(device: str, backend: str, case: AttentionCase) -> AttentionBackend | None:
    """Return the backend for a case; None: the one that comes with the other kernels.

    Raises InvalidRequest if it does not support the case.
    """
    refuse_int8(case)
    if device == "cpu" and backend == "auto":
        refuse_unsupported(case)
        return None
    return choose_attention(backend, case)


def load_triton(linear_backend: str = "auto", activation_dtype: str = "auto") -> KernelSet:
    """Return the Triton kernels, with torch references for ops that have none."""
    from .triton import triton_kernels

    return triton_kernels(linear_backend, activation_dtype)
