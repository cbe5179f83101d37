"""The table of ops: a line for each, with its type and its reference in torch.

Beside the reference, in the folder of the op, lie its other implementations: in C (cpu.py) and in
Triton (triton.py). `column` collects those of one kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .add_adapters import AddAdapters, add_adapters_reference
from .causal_conv import causal_conv_reference
from .choose import Choose, choose_reference
from .clamped_swiglu import ClampedSwiglu, clamped_swiglu_reference
from .commit_step import CommitStep, commit_step_reference
from .compilations import Compilations
from .dense_layer import DenseLayer, LayerTokens, RunDenseLayers
from .digest_pages import DigestPages, digest_pages_reference
from .fingerprint import Fingerprint, fingerprint_reference
from .gated_delta import gated_delta_reference
from .gather_step import GatherStep, gather_step_reference
from .gather_tokens import GatherTokens, gather_tokens_reference
from .gelu_and_mul import gelu_and_mul_reference
from .latent_attention import Attend, attend_reference
from .latent_choice import LatentChoice, latent_choice_reference
from .linear import (
    Linear,
    PackedHeads,
    PackedLinear,
    PackLinear,
    PackQuantized,
    PlainProducts,
    linear_reference,
    pack_linear_reference,
    pack_quantized_reference,
)
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
from .ngram import Ngram, ngram_reference
from .paged_attention import PagedAttention, paged_attention_reference
from .project_heads import HeadProjection
from .recurrent_rows import ConvState, DeltaState, RecurrentRows
from .rms_norm import add_rms_norm_reference, rms_norm_reference
from .rms_norm_gated import rms_norm_gated_reference
from .rotary import Rotary, rotary_reference
from .route import Route, RouteSigmoid, route_reference, route_sigmoid_reference
from .shape_logits import ShapeLogits, shape_logits_reference
from .silu_and_mul import silu_and_mul_reference
from .soft_cap import SoftCap, soft_cap_reference
from .store_kv import LayerCache, StoreKV, kv_cache_shape, store_kv_reference
from .write_runs import WriteRuns, write_runs_reference


@dataclass(frozen=True, slots=True)
class StepOps:
    """The ops that keep a step on its device.

    Those of a CPU are synchronous: an op is complete when it returns, and reading its output is
    free.
    """

    write_runs: WriteRuns = write_runs_reference
    gather_step: GatherStep = gather_step_reference
    gather_tokens: GatherTokens = gather_tokens_reference
    shape_logits: ShapeLogits = shape_logits_reference
    choose: Choose = choose_reference
    commit_step: CommitStep = commit_step_reference
    fingerprint: Fingerprint = fingerprint_reference
    synchronous: bool = False


STEP_REFERENCE = StepOps()
CPU_REFERENCE = StepOps(synchronous=True)


@dataclass(frozen=True, slots=True)
class LatentOps:
    """The ops for models with latent attention."""

    attend: Attend = attend_reference
    choose: LatentChoice = latent_choice_reference


LATENT_REFERENCE = LatentOps()


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops of one device. Shapes and dtypes are those of each op's reference.

    The methods fuse a product with what follows it in a layer. A device may have a faster
    implementation of any of them that gives the same bits.
    """

    name: str = "torch reference"
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm_reference
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = add_rms_norm_reference
    pack_linear: PackLinear = pack_linear_reference
    pack_quantized: PackQuantized = pack_quantized_reference
    linear: Linear = linear_reference
    add_adapters: AddAdapters = add_adapters_reference
    rotary: Rotary = rotary_reference
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]] = kv_cache_shape
    store_kv: StoreKV = store_kv_reference
    paged_attention: PagedAttention = paged_attention_reference
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul_reference
    gelu_and_mul: Callable[[Tensor], Tensor] = gelu_and_mul_reference
    clamped_swiglu: ClampedSwiglu = clamped_swiglu_reference
    soft_cap: SoftCap = soft_cap_reference
    causal_conv: Callable[[Tensor, Tensor, ConvState, RecurrentRows], Tensor] = (
        causal_conv_reference
    )
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, DeltaState, RecurrentRows], Tensor] = (
        gated_delta_reference
    )
    rms_norm_gated: Callable[[Tensor, Tensor, Tensor, float], Tensor] = rms_norm_gated_reference
    mul_sigmoid: Callable[[Tensor, Tensor], None] = mul_sigmoid_reference
    route: Route = route_reference
    route_sigmoid: RouteSigmoid = route_sigmoid_reference
    pack_experts: PackExperts = pack_experts_reference
    moe: Moe = moe_reference
    ngram: Ngram = ngram_reference
    digest_pages: DigestPages = digest_pages_reference
    latent: LatentOps = LATENT_REFERENCE
    step: StepOps = CPU_REFERENCE
    set_num_threads: Callable[[int], None] = torch.set_num_threads
    delta_chunk: int = 1  # prompt tokens that gated_delta processes at once; see RecurrentRows
    products: PlainProducts | None = None  # with unquantised weights, where there is a choice
    affine: bool = True  # pack_quantized takes affine weights
    code: bytes = b""  # compiled for this machine; empty = none
    compilations: Compilations = field(default_factory=Compilations)

    @property
    def linear_backend(self) -> str:
        """Name of the backend for unquantised weights; empty if there is only one."""
        return str(self.products.family) if self.products is not None else ""

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Return silu_and_mul [T, I] of x [T, K] times a packed weight with 2 I outputs."""
        return self.silu_and_mul(self.linear(x, packed))

    def linear_gelu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Return gelu_and_mul [T, I] of x [T, K] times a packed weight with 2 I outputs."""
        return self.gelu_and_mul(self.linear(x, packed))

    def linear_add_rms_norm(
        self,
        x: Tensor,
        packed: PackedLinear,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Add x [T, K] times the packed weight to residual [T, H]; return it normalised [T, H]."""
        return self.add_rms_norm(self.linear(x, packed), residual, weight, eps)

    def route_tokens(self, x: Tensor, router: Router, gate_up: PackedLinear | None) -> Mixture:
        """Choose experts for x [T, H]; with `gate_up` compute what the shared one activates."""
        logits = self.linear(x, router.scores, out_dtype=torch.float32)
        if router.sigmoid is not None:
            shared = None if gate_up is None else self.linear_silu_and_mul(x, gate_up)
            return Mixture(x, *self.route_sigmoid(logits, router.sigmoid), None, shared)
        if gate_up is None:
            return Mixture(x, *self.route(logits, router.top_k, normalize=router.normalize))
        shared = self.linear_silu_and_mul(x, gate_up)
        if router.gate is not None:
            gate = self.linear(x, router.gate)
        else:
            logits, gate = logits[:, :-1].contiguous(), logits[:, -1:].to(x.dtype)
        weights, experts = self.route(logits, router.top_k, normalize=router.normalize)
        return Mixture(x, weights, experts, gate, shared)

    def mix_experts(
        self, mixture: Mixture, packed: PackedExperts, shared_down: PackedLinear | None
    ) -> Tensor:
        """Return [T, H]: the shared expert, if there is one, plus each token's experts, in the
        order of expert numbers."""
        x, weights, experts, gate, shared = mixture
        if shared_down is None:
            total = torch.zeros_like(x, dtype=torch.float32)
        else:
            assert shared is not None
            made = self.linear(shared, shared_down)
            if gate is not None:
                self.mul_sigmoid(made, gate)
            total = made.float()
        self.moe(total, x, weights, experts, packed)
        return total.to(x.dtype)

    def mix_experts_add_rms_norm(
        self,
        mixture: Mixture,
        packed: PackedExperts,
        shared_down: PackedLinear | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Add `mix_experts` to residual [T, H]; return it normalised [T, H]."""
        mixed = self.mix_experts(mixture, packed, shared_down)
        return self.add_rms_norm(mixed, residual, weight, eps)

    def pack_heads(self, weights: Sequence[PackedLinear]) -> PackedHeads:
        """Put together packed weights of heads, which are kept as they are."""
        return PackedHeads(weights)

    def multiply_heads(self, x: Tensor, heads: PackedHeads) -> Tensor:
        """Return x [T, H, K] times the weight of each head: [T, H, N]."""
        made = [self.linear(x[:, i].contiguous(), weight) for i, weight in enumerate(heads.weights)]
        return torch.stack(made, dim=1)

    def project_heads(
        self,
        x: Tensor,
        projection: HeadProjection,
        positions: Tensor,
        cache: LayerCache,
        kv_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Project x [T, K] to heads, store keys and values, and return queries [T, Hq, D] and
        others.

        Queries and keys are normalised if there are norms, and rotated to their positions i64[T].
        Norms are of each head, or of all heads of a token together.
        """
        sizes = projection.sizes
        made = self.linear(x, projection.packed).view(len(x), sum(sizes), projection.head_dim)
        q, others, k, v = made.split(sizes, dim=1)
        if projection.q_norm is not None and projection.k_norm is not None:
            q = self._norm_heads(q, projection.q_norm, projection.eps)
            k = self._norm_heads(k, projection.k_norm, projection.eps)
        self.rotary(q, k, positions, projection.cos_sin)
        self.store_kv(k, v, cache, kv_slots)
        return q, others

    def _norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.numel() == heads.shape[2]:
            return self.rms_norm(heads, weight, eps)
        return self.rms_norm(heads.flatten(1), weight, eps).view(heads.shape)

    def dense_layers(
        self, layers: Sequence[DenseLayer], next_norms: Sequence[Tensor]
    ) -> RunDenseLayers:
        """Return what runs the layers, made ready when a model is loaded: here, op by op.

        `next_norms` f32[H]: the weights with which the output of each is normalised.
        """

        def run(
            x: Tensor,
            residual: Tensor,
            places: Sequence[tuple[LayerTokens, LayerCache]],
            first: int = 0,
        ) -> Tensor:
            which = slice(first, first + len(places))
            for layer, norm, place in zip(layers[which], next_norms[which], places, strict=True):
                x = self._dense_layer(x, residual, layer, norm, *place)
            return x

        return run

    def _dense_layer(
        self,
        x: Tensor,
        residual: Tensor,
        layer: DenseLayer,
        next_norm: Tensor,
        tokens: LayerTokens,
        cache: LayerCache,
    ) -> Tensor:
        at = tokens.positions, cache, tokens.kv_slots
        q, _ = self.project_heads(x, layer.projection, *at)
        attended = self.paged_attention(
            q, cache, tokens.rows, layer.scale, window=layer.window, sinks=layer.sinks
        )
        flat, eps = attended.flatten(1), layer.eps
        x = self.linear_add_rms_norm(flat, layer.out, residual, layer.post_norm, eps)
        x = self.linear_silu_and_mul(x, layer.gate_up)
        return self.linear_add_rms_norm(x, layer.down, residual, next_norm, eps)


REFERENCE = KernelSet()


def column(
    ops: type[KernelSet | StepOps | LatentOps],
    name: str,
    read: Callable[[ModuleType], Mapping[str, Any]] = vars,
) -> dict[str, Any]:
    """Return those ops that have an implementation of this name beside their reference."""
    read, found = functools.cache(read), dict[str, Any]()
    for op in fields(ops):
        if (module := _beside(op.default, f".{name}")) is not None and op.name in read(module):
            found[op.name] = read(module)[op.name]
    return found


def _beside(reference: object, name: str) -> ModuleType | None:
    if not isinstance(reference, FunctionType):
        return None
    folder = reference.__module__.rpartition(".")[0]
    return import_module(name, folder) if find_spec(name, folder) is not None else None
