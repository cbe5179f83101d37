"""Choose the implementation of each op: once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from surestep_common.errors import InvalidRequest
from torch import Tensor

from surestep_kernels.columns.cpu.build import build_library, file_of
from surestep_kernels.columns.cpu.compiling import BuildError
from surestep_kernels.columns.cpu.latent_ops import CpuLatentOps
from surestep_kernels.columns.cpu.layer_ops import CpuKernels, load_layers
from surestep_kernels.columns.cpu.ops import CpuOps, refuse_unsupported
from surestep_kernels.columns.cpu.recurrent_ops import CpuRecurrentOps
from surestep_kernels.columns.cpu.step_ops import CpuStepOps
from surestep_kernels.paged_attention.backends import choose_attention

from .clamped_swiglu import ClampedSwiglu
from .linear import Linear, with_rounded_rows
from .moe import Moe, moe_reference, pack_experts_reference
from .paged_attention import AttentionCase, refuse_int8
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
) -> KernelSet:
    """Return the fastest kernels that run on `device` ("cpu", "cuda" or "cuda:0").

    On the CPU the C kernels are compiled on first use, unless their `code` is given; if they cannot
    be compiled, or with cpu_kernels="reference", the torch references are used. They run on one
    thread until `set_num_threads` is called.

    The attention backend is chosen for `case`, which may be left at its defaults; "auto" on the CPU
    is the one that comes with the other kernels. The linear backend chooses the products with
    unquantised weights on CUDA (see Products).
    With the activation dtype "fp8", inputs of FP8 weights are rounded to FP8 (see fp8_rows.py).
    Raises InvalidRequest if a backend does not support the case.
    """
    kernels = REFERENCE
    if device == "cpu" and cpu_kernels == "auto":
        kernels = load_cpu(code) or REFERENCE
    elif device.startswith("cuda"):
        from surestep_kernels.columns.gpu.compilations import check_kernel_cache

        check_kernel_cache()
        kernels = load_triton(linear_backend, activation_dtype)
    if device == "cpu" and linear_backend != "auto":
        raise InvalidRequest("a cpu has one linear backend", param="linear_backend")
    if device == "cpu" and activation_dtype == "fp8":
        linear = with_rounded_rows(kernels.linear)
        activations = kernels.silu_and_mul, kernels.clamped_swiglu
        kernels = replace(kernels, linear=linear, moe=_moe_of(linear, *activations))
    logger.info("kernels for %s: %s", device, kernels.name)
    case = case or AttentionCase.on(device)
    refuse_int8(case)
    if device == "cpu" and attention_backend == "auto":
        refuse_unsupported(case)
        return kernels
    backend = choose_attention(attention_backend, case)
    return replace(
        kernels,
        kv_cache_shape=backend.kv_cache_shape,
        store_kv=backend.store_kv,
        paged_attention=backend.paged_attention,
    )


def load_triton(linear_backend: str = "auto", activation_dtype: str = "auto") -> KernelSet:
    """Return the Triton kernels, with torch references for ops that have none."""
    from .triton_table import triton_kernels

    return triton_kernels(linear_backend, activation_dtype)


def load_cpu(code: bytes = b"") -> KernelSet | None:
    """Return the C kernels, from their `code` or compiled, or None after a warning that says why
    not."""
    try:
        code = code or build_library()
        library = file_of(code)
        ops, recurrent = CpuOps.load(library), CpuRecurrentOps.load(library)
        step, layers = CpuStepOps.load(library), load_layers(library)
    except (BuildError, OSError) as error:
        logger.warning("no C kernels, using the much slower torch references: %s", error)
        return None
    ops.set_num_threads(1)
    return CpuKernels(
        name="C",
        c_dense_layers=layers,
        ops=ops,
        set_num_threads=ops.set_num_threads,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        pack_linear=ops.pack_linear,
        pack_quantized=ops.pack_quantized,
        linear=ops.linear,
        rotary=ops.rotary,
        kv_cache_shape=ops.kv_cache_shape,
        store_kv=ops.store_kv,
        paged_attention=ops.paged_attention,
        silu_and_mul=ops.silu_and_mul,
        clamped_swiglu=ops.clamped_swiglu,
        causal_conv=recurrent.causal_conv,
        gated_delta=recurrent.gated_delta,
        rms_norm_gated=recurrent.rms_norm_gated,
        mul_sigmoid=recurrent.mul_sigmoid,
        route=recurrent.route,
        route_sigmoid=recurrent.route_sigmoid,
        latent=CpuLatentOps.load(library).table,
        pack_experts=pack_experts_reference,
        moe=_moe_of(ops.linear, ops.silu_and_mul, ops.clamped_swiglu),
        ngram=step.ngram,
        step=replace(step.table, synchronous=True),
        code=code,
    )


def _moe_of(
    linear: Linear, silu_and_mul: Callable[[Tensor], Tensor], clamped_swiglu: ClampedSwiglu
) -> Moe:
    return partial(
        moe_reference, linear=linear, silu_and_mul=silu_and_mul, clamped_swiglu=clamped_swiglu
    )
