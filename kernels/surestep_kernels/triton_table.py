"""The ops of a CUDA device: Triton's, and references where a kernel would not pay off."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from surestep_kernels.causal_conv.triton import causal_conv
from surestep_kernels.choose.triton import choose
from surestep_kernels.clamped_swiglu.triton import clamped_swiglu
from surestep_kernels.columns.gpu.compilations import watch_compilations
from surestep_kernels.columns.products.families import Products
from surestep_kernels.commit_step.triton import commit_step
from surestep_kernels.fingerprint.triton import fingerprint
from surestep_kernels.gated_delta.chunks import CHUNK
from surestep_kernels.gated_delta.triton import gated_delta
from surestep_kernels.gather_step.triton import gather_step
from surestep_kernels.gather_tokens.triton import gather_tokens
from surestep_kernels.latent_attention.triton import attend
from surestep_kernels.latent_choice.triton import choose as choose_latents
from surestep_kernels.linear.triton import LinearPartials, linear_partials, pack_quantized
from surestep_kernels.moe.mixture import mix_experts_add_rms_norm, route_tokens
from surestep_kernels.moe.triton import moe, pack_experts
from surestep_kernels.mul_sigmoid.triton import mul_sigmoid
from surestep_kernels.ngram.triton import ngram
from surestep_kernels.project_heads.triton import project_heads_of_partials
from surestep_kernels.rms_norm.triton import add_rms_norm, add_rms_norm_of_partials, rms_norm
from surestep_kernels.rms_norm_gated.triton import rms_norm_gated
from surestep_kernels.rotary.triton import rotary
from surestep_kernels.route.triton import route, route_sigmoid
from surestep_kernels.shape_logits.triton import shape_logits
from surestep_kernels.silu_and_mul.triton import silu_and_mul, silu_and_mul_of_partials
from surestep_kernels.store_kv.triton import store_kv
from surestep_kernels.write_runs.triton import write_runs

from .linear import PackedLinear
from .moe import Mixture, PackedExperts, Router
from .project_heads import HeadProjection
from .store_kv import LayerCache
from .table import REFERENCE, KernelSet, LatentOps, StepOps

LATENT_OPS = LatentOps(attend, choose_latents)
STEP_OPS = StepOps(
    write_runs=write_runs,
    gather_step=gather_step,
    gather_tokens=gather_tokens,
    shape_logits=shape_logits,
    choose=choose,
    commit_step=commit_step,
    fingerprint=fingerprint,
)


@dataclass(frozen=True, slots=True)
class TritonKernels(KernelSet):
    """Whatever follows a product is fused into the kernel that adds up its splits."""

    linear_partials: LinearPartials = linear_partials
    products: Products = field(default_factory=Products)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return silu_and_mul_of_partials(self.linear_partials(x, packed))

    def linear_add_rms_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        return add_rms_norm_of_partials(self.linear_partials(x, packed), residual, weight, eps)

    def route_tokens(self, x: Tensor, router: Router, gate_up: PackedLinear | None) -> Mixture:
        """Route x. A checkpoint may have quantised the router, but not the gate beside it."""
        if router.gate is not None or router.sigmoid is not None:
            return KernelSet.route_tokens(self, x, router, gate_up)
        # The bias is left to the next kernel for any number of rows: its loads are then laid out
        # alike, and with them the order in which threads add up the softmax.
        unbiased = replace(router.scores, bias=None)
        scores = self.linear_partials(x, unbiased, torch.float32)._replace(bias=router.scores.bias)
        shared = None if gate_up is None else self.linear_partials(x, gate_up)
        return route_tokens(scores, shared, x, router)

    def mix_experts_add_rms_norm(
        self,
        mixture: Mixture,
        packed: PackedExperts,
        shared_down: PackedLinear | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Mix, add and normalise. Experts of several layouts are run one by one."""
        if packed.addresses is None or (shared_down is not None and mixture.gate is None):
            return KernelSet.mix_experts_add_rms_norm(
                self, mixture, packed, shared_down, residual, weight, eps
            )
        shared = None
        if shared_down is not None:
            assert mixture.shared is not None
            shared = self.linear_partials(mixture.shared, shared_down)
        return mix_experts_add_rms_norm(
            *(mixture, packed, shared, residual, weight, eps, self.products.widths),
            fp8_rows=self.products.fp8_rows,
        )

    def project_heads(
        self,
        x: Tensor,
        projection: HeadProjection,
        positions: Tensor,
        cache: LayerCache,
        kv_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Project x. Other attention backends store keys and values in their own way."""
        if self.store_kv is not store_kv:
            return KernelSet.project_heads(self, x, projection, positions, cache, kv_slots)
        partials = self.linear_partials(x, projection.packed)
        return project_heads_of_partials(partials, projection, positions, cache, kv_slots)


def _moe(
    products: Products,
    total: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: PackedExperts,
) -> None:
    moe(total, x, weights, experts, packed, products.widths, fp8_rows=products.fp8_rows)


def triton_kernels(linear_backend: str, activation_dtype: str) -> TritonKernels:
    """Return the Triton kernels with the references' attention."""
    fp8 = activation_dtype == "fp8"
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise InvalidRequest("this GPU does not multiply FP8", param="activation_dtype")
    products = Products(linear_backend, fp8_rows=fp8)
    return TritonKernels(
        name="Triton and torch references",
        set_num_threads=REFERENCE.set_num_threads,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        pack_linear=REFERENCE.pack_linear,
        pack_quantized=pack_quantized,
        affine=False,
        linear=products.linear,
        linear_partials=products.partials,
        products=products,
        rotary=rotary,
        kv_cache_shape=REFERENCE.kv_cache_shape,
        store_kv=REFERENCE.store_kv,
        paged_attention=REFERENCE.paged_attention,
        silu_and_mul=silu_and_mul,
        clamped_swiglu=clamped_swiglu,
        causal_conv=causal_conv,
        gated_delta=gated_delta,
        rms_norm_gated=rms_norm_gated,
        mul_sigmoid=mul_sigmoid,
        route=route,
        pack_experts=pack_experts,
        moe=partial(_moe, products),
        ngram=ngram,
        latent=LATENT_OPS,
        route_sigmoid=route_sigmoid,
        delta_chunk=CHUNK,
        step=STEP_OPS,
        compilations=watch_compilations(),
    )
