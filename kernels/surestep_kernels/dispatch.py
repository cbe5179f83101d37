"""Which implementation serves each op: decided once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

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
from .head_projection import HeadProjection
from .kv_cache import LayerCache, StoreKV, kv_cache_shape, store_kv_reference
from .linear import Linear, PackedLinear, PackLinear, linear_reference, pack_linear_reference
from .moe import (
    Mixture,
    Moe,
    PackedExperts,
    PackExperts,
    Router,
    moe_reference,
    pack_experts_reference,
)
from .mul_sigmoid import mul_sigmoid_reference
from .native import NativeOps, refuse_unserved
from .native_recurrent import NativeRecurrentOps
from .native_step import NativeStepOps
from .ngram import Ngram, ngram_reference
from .paged_attention import PagedAttention, paged_attention_reference
from .quantized import PackQuantized, pack_quantized_reference
from .recurrent import ConvState, DeltaState, RecurrentRows
from .rms_norm import add_rms_norm_reference, rms_norm_reference
from .rms_norm_gated import rms_norm_gated_reference
from .rotary import Rotary, rotary_reference
from .route import Route, route_reference
from .silu_and_mul import silu_and_mul_reference
from .step_ops import CPU_REFERENCE, StepOps

if TYPE_CHECKING:
    from .gpu.products import Products

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops of one device. Shapes and dtypes are those of each op's reference.

    The methods are products together with what follows them in a layer. A device may have a faster
    way for any of them, which gives the same bits.
    """

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
    step: StepOps = CPU_REFERENCE
    products: Products | None = None  # those of plain weights, where there is a choice
    code: bytes = b""  # compiled for this machine; empty = none
    compilations: Compilations = field(default_factory=Compilations)

    @property
    def linear_backend(self) -> str:
        """What multiplies by plain weights; empty where there is one for all."""
        return str(self.products.family) if self.products is not None else ""

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """silu_and_mul of x [T, K] times a packed weight of 2 I outputs: [T, I]."""
        return self.silu_and_mul(self.linear(x, packed))

    def linear_add_rms_norm(
        self,
        x: Tensor,
        packed: PackedLinear,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """residual [T, H] += x [T, K] times the packed weight; returns it normalised [T, H]."""
        return self.add_rms_norm(self.linear(x, packed), residual, weight, eps)

    def route_tokens(self, x: Tensor, router: Router, gate_up: PackedLinear) -> Mixture:
        """What x [T, H] takes of experts, and gates of the shared one, which has `gate_up`."""
        shared = self.linear_silu_and_mul(x, gate_up)
        logits = self.linear(x, router.scores, out_dtype=torch.float32)
        if router.gate is not None:
            gate = self.linear(x, router.gate)
        else:
            logits, gate = logits[:, :-1].contiguous(), logits[:, -1:].to(x.dtype)
        weights, experts = self.route(logits, router.top_k, normalize=router.normalize)
        return Mixture(x, weights, experts, gate, shared)

    def mix_experts(
        self, mixture: Mixture, packed: PackedExperts, shared_down: PackedLinear
    ) -> Tensor:
        """[T, H]: the shared expert and, in the order of their numbers, those of each token."""
        shared = self.linear(mixture.shared, shared_down)
        self.mul_sigmoid(shared, mixture.gate)
        total = shared.float()
        self.moe(total, *mixture[:3], packed)
        return total.to(shared.dtype)

    def mix_experts_add_rms_norm(
        self,
        mixture: Mixture,
        packed: PackedExperts,
        shared_down: PackedLinear,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """residual [T, H] += `mix_experts`; returns it normalised [T, H]."""
        mixed = self.mix_experts(mixture, packed, shared_down)
        return self.add_rms_norm(mixed, residual, weight, eps)

    def project_heads(
        self,
        x: Tensor,
        projection: HeadProjection,
        positions: Tensor,
        cache: LayerCache,
        kv_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Heads of x [T, K]: queries [T, Hq, D] and others; keys and values are stored.

        Queries and keys are normalised, if there are norms, and rotated to their positions i64[T].
        """
        sizes = projection.sizes
        made = self.linear(x, projection.packed).view(len(x), sum(sizes), projection.head_dim)
        q, others, k, v = made.split(sizes, dim=1)
        if projection.q_norm is not None and projection.k_norm is not None:
            q = self.rms_norm(q, projection.q_norm, projection.eps)
            k = self.rms_norm(k, projection.k_norm, projection.eps)
        self.rotary(q, k, positions, projection.cos_sin)
        self.store_kv(k, v, cache, kv_slots)
        return q, others


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
    FP8 cache. The linear backend is that of products with plain weights on CUDA: see Products. With
    the activation dtype "fp8" what FP8 weights are multiplied by is rounded to FP8: see
    fp8_rows.py. Raises InvalidRequest when a backend does not serve the case.
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
    from .gpu.kernel_set import triton_kernels

    return triton_kernels(linear_backend, activation_dtype)


def load_native(code: bytes = b"") -> KernelSet | None:
    """The C kernels, from their `code` or compiled; None after a warning that says why not."""
    try:
        code = code or build_library()
        library = file_of(code)
        ops, recurrent = NativeOps.load(library), NativeRecurrentOps.load(library)
        step = NativeStepOps.load(library)
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
        ngram=step.ngram,
        step=replace(step.table, synchronous=True),
        code=code,
    )
