"""Which implementation serves each op: decided once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from .attention import AttentionCase, choose_attention
from .build import build_library, file_of
from .causal_conv import causal_conv_reference
from .compilations import Compilations
from .compiling import BuildError
from .fp8_rows import with_rounded_rows
from .gated_delta import gated_delta_reference
from .kv_cache import StoreKV, kv_cache_shape, store_kv_reference
from .linear import Linear, PackLinear, linear_reference, pack_linear_reference
from .moe import Moe, PackExperts, moe_reference, pack_experts_reference
from .mul_sigmoid import mul_sigmoid_reference
from .native import NativeOps, refuse_unserved
from .native_recurrent import NativeRecurrentOps
from .ngram import Ngram, ngram_reference
from .paged_attention import PagedAttention, paged_attention_reference
from .quantized import PackQuantized, pack_quantized_reference
from .recurrent import ConvState, DeltaState, RecurrentRows
from .rms_norm import add_rms_norm_reference, rms_norm_reference
from .rms_norm_gated import rms_norm_gated_reference
from .rotary import Rotary, rotary_reference
from .route import Route, route_reference
from .silu_and_mul import silu_and_mul_reference
from .step_ops import StepOps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops of one device. Shapes and dtypes are those of each op's reference."""

    name: str
    set_num_threads: Callable[[int], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    pack_linear: PackLinear
    pack_quantized: PackQuantized
    linear: Linear
    rotary: Rotary
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    store_kv: StoreKV
    paged_attention: PagedAttention
    silu_and_mul: Callable[[Tensor], Tensor]
    causal_conv: Callable[[Tensor, Tensor, ConvState, RecurrentRows], Tensor]
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, DeltaState, RecurrentRows], Tensor]
    rms_norm_gated: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    mul_sigmoid: Callable[[Tensor, Tensor], None]
    route: Route
    pack_experts: PackExperts
    moe: Moe
    ngram: Ngram
    delta_chunk: int = 1  # tokens of a prompt that gated_delta takes at once; see RecurrentRows
    step: StepOps | None = None  # None: steps run on the host
    code: bytes = b""  # compiled for this machine; empty = none
    compilations: Compilations = field(default_factory=Compilations)


REFERENCE = KernelSet(
    name="torch reference",
    set_num_threads=torch.set_num_threads,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    pack_linear=pack_linear_reference,
    pack_quantized=pack_quantized_reference,
    linear=linear_reference,
    rotary=rotary_reference,
    kv_cache_shape=kv_cache_shape,
    store_kv=store_kv_reference,
    paged_attention=paged_attention_reference,
    silu_and_mul=silu_and_mul_reference,
    causal_conv=causal_conv_reference,
    gated_delta=gated_delta_reference,
    rms_norm_gated=rms_norm_gated_reference,
    mul_sigmoid=mul_sigmoid_reference,
    route=route_reference,
    pack_experts=pack_experts_reference,
    moe=moe_reference,
    ngram=ngram_reference,
)


def load_kernels(
    device: str,
    cpu_kernels: Literal["auto", "reference"] = "auto",
    attention_backend: str = "auto",
    case: AttentionCase | None = None,
    linear_backend: str = "auto",
    code: bytes = b"",
    activation_dtype: str = "auto",
) -> KernelSet:
    """The fastest kernels that run on `device` ("cpu", "cuda" or "cuda:0").

    On the CPU the C kernels are compiled when they are first used, unless their `code` is given;
    where that is impossible, or with cpu_kernels="reference", the torch references serve. They use
    one thread until `set_num_threads`. Attention is that of the backend named, for a `case` that
    may be left to its defaults; "auto" on the CPU is what comes with the other kernels, and has no
    FP8 cache. The linear backend is that of products with plain weights on CUDA: Triton's, in which
    a row does not depend on the number of rows, or with "torch" cuBLAS's. With the activation dtype
    "fp8" what FP8 weights are multiplied by is rounded to FP8: see fp8_rows.py. Raises
    InvalidRequest when a backend does not serve the case.
    """
    kernels = REFERENCE
    if device == "cpu" and cpu_kernels == "auto":
        kernels = load_native(code) or REFERENCE
    elif device.startswith("cuda"):
        kernels = load_triton(linear_backend, activation_dtype)
    if device == "cpu" and linear_backend != "auto":
        raise InvalidRequest("a cpu has one linear backend", param="linear_backend")
    if device == "cpu" and activation_dtype == "fp8":
        linear = with_rounded_rows(kernels.linear)
        moe = partial(moe_reference, linear=linear, silu_and_mul=kernels.silu_and_mul)
        kernels = replace(kernels, linear=linear, moe=moe)
    logger.info("kernels for %s: %s", device, kernels.name)
    if device == "cpu" and attention_backend == "auto":
        refuse_unserved(case or AttentionCase.on(device))
        return kernels
    backend = choose_attention(attention_backend, case or AttentionCase.on(device))
    return replace(
        kernels,
        kv_cache_shape=backend.kv_cache_shape,
        store_kv=backend.store_kv,
        paged_attention=backend.paged_attention,
    )


def load_triton(linear_backend: str = "auto", activation_dtype: str = "auto") -> KernelSet:
    """The Triton kernels; torch references where there is none. See load_kernels."""
    from .gpu.causal_conv import causal_conv
    from .gpu.compilations import watch_compilations
    from .gpu.gated_delta import gated_delta
    from .gpu.gated_delta_chunks import CHUNK
    from .gpu.linear import LINEAR, pack_quantized, with_fp8_rows
    from .gpu.moe import moe, pack_experts
    from .gpu.mul_sigmoid import mul_sigmoid
    from .gpu.ngram import ngram
    from .gpu.rms_norm import add_rms_norm, rms_norm
    from .gpu.rms_norm_gated import rms_norm_gated
    from .gpu.rotary import rotary
    from .gpu.route import route
    from .gpu.silu_and_mul import silu_and_mul
    from .gpu.step_ops import STEP_OPS

    fp8 = activation_dtype == "fp8"
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise InvalidRequest("this GPU does not multiply FP8", param="activation_dtype")
    return replace(
        REFERENCE,
        name="Triton and torch references",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        pack_quantized=pack_quantized,
        linear=with_fp8_rows(LINEAR[linear_backend]) if fp8 else LINEAR[linear_backend],
        rotary=rotary,
        silu_and_mul=silu_and_mul,
        causal_conv=causal_conv,
        gated_delta=gated_delta,
        rms_norm_gated=rms_norm_gated,
        mul_sigmoid=mul_sigmoid,
        route=route,
        pack_experts=pack_experts,
        moe=partial(moe, fp8_rows=True) if fp8 else moe,
        ngram=ngram,
        delta_chunk=CHUNK,
        step=STEP_OPS,
        compilations=watch_compilations(),
    )


def load_native(code: bytes = b"") -> KernelSet | None:
    """The C kernels, from their `code` or compiled; None after a warning that says why not."""
    try:
        code = code or build_library()
        library = file_of(code)
        ops, recurrent = NativeOps.load(library), NativeRecurrentOps.load(library)
    except (BuildError, OSError) as error:
        logger.warning("no C kernels, the much slower torch references serve: %s", error)
        return None
    ops.set_num_threads(1)
    return KernelSet(
        name="C",
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
        causal_conv=recurrent.causal_conv,
        gated_delta=recurrent.gated_delta,
        rms_norm_gated=recurrent.rms_norm_gated,
        mul_sigmoid=recurrent.mul_sigmoid,
        route=recurrent.route,
        pack_experts=pack_experts_reference,
        moe=partial(moe_reference, linear=ops.linear, silu_and_mul=ops.silu_and_mul),
        ngram=ngram_reference,
        code=code,
    )
