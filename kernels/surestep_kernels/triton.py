"""The ops of a CUDA device: Triton's, and references where a kernel would not pay off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from .columns.gpu.compilations import watch_compilations
from .columns.products.families import Products
from .gated_delta.chunks import CHUNK
from .gelu_and_mul.triton import gelu_and_mul_of_partials
from .linear import PackedHeads, PackedLinear
from .linear.triton import LinearPartials, linear_partials
from .moe import ExpertAdapters, Mixture, PackedExperts, Router
from .moe.mixture import mix_experts_add_rms_norm, route_tokens
from .moe.products import multiply_heads, pack_heads
from .moe.triton import moe
from .project_heads import HeadProjection
from .project_heads.triton import project_heads_of_partials
from .rms_norm.triton import add_rms_norm_of_partials
from .silu_and_mul.triton import silu_and_mul_of_partials
from .store_kv import LayerCache
from .store_kv.triton import store_kv
from .table import REFERENCE, KernelSet, LatentOps, StepOps, column

LATENT_OPS = LatentOps(**column(LatentOps, "triton"))
STEP_OPS = StepOps(**column(StepOps, "triton"))


@dataclass(frozen=True, slots=True)
class TritonKernels(KernelSet):
    """Whatever follows a product is fused into the kernel that adds up its splits."""

    linear_partials: LinearPartials = linear_partials
    products: Products = field(default_factory=Products)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return silu_and_mul_of_partials(self.linear_partials(x, packed))

    def linear_gelu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return gelu_and_mul_of_partials(self.linear_partials(x, packed))

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
            mixture,
            packed,
            shared,
            residual,
            weight,
            eps,
            self.products.widths,
            fp8_rows=self.products.fp8_rows,
        )

    def pack_heads(self, weights: Sequence[PackedLinear]) -> PackedHeads:
        return pack_heads(weights)

    def multiply_heads(self, x: Tensor, heads: PackedHeads) -> Tensor:
        """Multiply x in one launch. Heads of several layouts are multiplied one by one."""
        if heads.addresses is None:
            return KernelSet.multiply_heads(self, x, heads)
        products = self.products
        return multiply_heads(x, heads, products.widths, fp8_rows=products.fp8_rows)

    def project_heads(
        self,
        x: Tensor,
        projection: HeadProjection,
        positions: Tensor,
        cache: LayerCache,
        kv_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Project x. Other attention backends store keys and values in their own way."""
        if self.store_kv is not store_kv or projection.joint_norms:
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
    *,
    adapters: ExpertAdapters | None = None,
) -> None:
    how, fp8_rows = products.widths, products.fp8_rows
    moe(total, x, weights, experts, packed, how, adapters=adapters, fp8_rows=fp8_rows)


def triton_kernels(linear_backend: str, activation_dtype: str) -> TritonKernels:
    """Return the Triton kernels with the references' attention."""
    fp8 = activation_dtype == "fp8"
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise InvalidRequest("this GPU does not multiply FP8", param="activation_dtype")
    products = Products(linear_backend, fp8_rows=fp8)
    ops = column(KernelSet, "triton") | {
        "linear": products.linear,
        "store_kv": REFERENCE.store_kv,
        "paged_attention": REFERENCE.paged_attention,
        "moe": partial(_moe, products),
    }
    return TritonKernels(
        **ops,
        name="Triton and torch references",
        affine=False,
        linear_partials=products.partials,
        products=products,
        latent=LATENT_OPS,
        delta_chunk=CHUNK,
        step=STEP_OPS,
        compilations=watch_compilations(),
    )
