"""Routed experts, beside a shared one or without.

The ranks share out either the columns of every expert (tensor parallel) or the experts themselves
(expert parallel); the sum over the ranks is the same.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.moe import PackedExperts, Router
from surestep_kernels.route import SigmoidChoice
from torch import Tensor

from surestep_worker.adapters.kernels import AdaptedKernels, Stack, plain_kernels
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.configs.layer_sizes import (
    MoeConfig,
    RoutedConfig,
    SigmoidRouting,
    SparseConfig,
)
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext, Mixed
from .linear import Sharding, ShardSlice, are_alike, take_linear
from .mlp import GatedMlp, mlp_table


def local_experts(count: int, shard: Sharding) -> range:
    """Return the experts, among `count`, of which this rank holds weights."""
    if not shard.expert_parallel:
        return range(count)
    keep = shard.part(count).keep
    return range(keep.start, keep.stop)


def experts_elsewhere(count: int, shard: Sharding) -> str:
    """Return a regular expression of the tensors of experts that other ranks hold."""
    mine = local_experts(count, shard)
    others = (str(expert) for expert in range(count) if expert not in mine)
    return rf".*\.(mlp|block_sparse_moe)\.experts\.({'|'.join(others) or '(?!)'})\..*"


def moe_table(
    to: str, at: str, config: SparseConfig, shard: Sharding, names: Set[str]
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`, of a checkpoint with these `names`.

    It holds two tensors with all experts, or three per expert. The gate of the shared expert, if it
    has one, is the last output of the router, if both are kept in one form.
    """
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    fused = f"{at}experts.gate_up_proj" in names
    experts = (_fused_experts if fused else _separate_experts)(to, at, config, shard)
    router = [(f"{at}gate", ShardSlice(moe.num_experts, slice(0, moe.num_experts)))]
    if moe.sigmoid is not None:
        shared, bias = f"{at}shared_experts.", f"{at}gate.e_score_correction_bias"
        return {
            **shard.columns(f"{to}router", router, width, bias=False, exact=True),
            f"{to}router_bias": shard.whole(bias, moe.num_experts),
            **mlp_table(f"{to}shared.", shared, width, moe.shared_expert_size, shard),
            **experts,
        }
    if not moe.shared_expert_size:
        return shard.columns(f"{to}router", router, width, bias=False, exact=True) | experts
    gate = [(f"{at}shared_expert_gate", ShardSlice(1, slice(0, 1)))]
    if are_alike([name for name, _ in (*router, *gate)], names):
        projections = shard.columns(f"{to}router", [*router, *gate], width, bias=False, exact=True)
    else:
        projections = shard.columns(f"{to}router", router, width, bias=False, exact=True)
        projections |= shard.columns(f"{to}shared_gate", gate, width, bias=False, exact=True)
    return {
        **projections,
        **mlp_table(f"{to}shared.", f"{at}shared_expert.", width, moe.shared_expert_size, shard),
        **experts,
    }


def _inner(moe: MoeConfig, shard: Sharding) -> ShardSlice:
    """This rank's columns of an expert."""
    whole = ShardSlice(moe.expert_size, slice(0, moe.expert_size))
    return whole if shard.expert_parallel else shard.part(moe.expert_size)


def _separate_experts(
    to: str, at: str, config: SparseConfig, shard: Sharding
) -> dict[str, Parameter]:
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    part, table = _inner(moe, shard), dict[str, Parameter]()
    for expert in local_experts(moe.num_experts, shard):
        gate, up, down = (f"{at}experts.{expert}.{name}" for name in moe.projections)
        gate_up = [(gate, part), (up, part)]
        table |= shard.columns(f"{to}{expert}.gate_up", gate_up, width, bias=False)
        table |= shard.rows(f"{to}{expert}.down", down, width, part, bias=False)
    return table


def _fused_experts(to: str, at: str, config: SparseConfig, shard: Sharding) -> dict[str, Parameter]:
    """Take a parameter per expert and projection, cut out of the tensors of all experts."""
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    inner, count, table = moe.expert_size, moe.num_experts, dict[str, Parameter]()
    keep = _inner(moe, shard).keep
    shapes = {"gate_up_proj": (count, 2 * inner, width), "down_proj": (count, width, inner)}

    def cut(name: str, expert: int, columns: slice, dim: int) -> TensorSource:
        return TensorSource(f"{at}experts.{name}", shapes[name], columns, dim, item=expert)

    for expert in local_experts(moe.num_experts, shard):
        up = slice(inner + keep.start, inner + keep.stop)
        gate_up = (cut("gate_up_proj", expert, part, 0) for part in (keep, up))
        size = keep.stop - keep.start
        table[f"{to}{expert}.gate_up.weight"] = Parameter(
            (2 * size, width), tuple(gate_up), linear=True
        )
        down = cut("down_proj", expert, keep, 1)
        table[f"{to}{expert}.down.weight"] = Parameter((width, size), (down,), linear=True)
    return table


class SparseMoe:
    """This rank's share of the routed experts, and of the shared one if there is one."""

    def __init__(self, to: str, context: LayerContext[SparseConfig]) -> None:
        moe, weights, kernels = context.config.moe, context.weights, context.kernels
        assert moe is not None
        self._ops = kernels
        scores, apart = take_linear(weights, f"{to}router", kernels), f"{to}shared_gate" in weights
        gate = take_linear(weights, f"{to}shared_gate", kernels) if apart else None
        choice = None if moe.sigmoid is None else _sigmoid_choice(to, weights, moe, moe.sigmoid)
        self._router = Router(scores, gate, moe.top_k, moe.normalize, choice)
        self._shared_gate_up, self._shared_down = None, None
        if moe.shared_expert_size:
            self._shared_gate_up = take_linear(weights, f"{to}shared.gate_up", kernels)
            self._shared_down = take_linear(weights, f"{to}shared.down", kernels)
        experts = local_experts(moe.num_experts, context.shard)
        plain = plain_kernels(kernels)
        gate_up = [take_linear(weights, f"{to}{i}.gate_up", plain) for i in experts]
        down = [take_linear(weights, f"{to}{i}.down", plain) for i in experts]
        self._experts = kernels.pack_experts(gate_up, down, experts.start)
        stack = Stack(moe.num_experts, moe.expert_size, context.config.hidden_size)
        _adapt(to, context, self._experts, stack, _inner(moe, context.shard).keep)

    def __call__(self, x: Tensor) -> Mixed:
        """[T, H] -> [T, H], to be summed over the ranks.

        The experts of a token are added in the order of their numbers, whatever its neighbours.
        """
        mixture = self._ops.route_tokens(x, self._router, self._shared_gate_up)
        return Mixed(mixture, self._experts, self._shared_down)


def _adapt(
    to: str, context: LayerContext[ModelConfig], experts: PackedExperts, stack: Stack, keep: slice
) -> None:
    """Let a layer's experts have adapters, where kernels add any."""
    if isinstance(context.kernels, AdaptedKernels):
        block = context.weights.pieces(f"{to}router")[0].module.rpartition(".")[0]
        rows = context.kernels.rows
        rows.adapt_experts(f"{to}experts", f"{block}.experts", experts, stack, keep)


def dense_or_sparse(to: str, context: LayerContext[SparseConfig]) -> SparseMoe | GatedMlp:
    """Return a layer's routed experts, or its dense block where its parameters are of one."""
    return (SparseMoe if f"{to}router" in context.weights else GatedMlp)(to, context)


def _sigmoid_choice(
    to: str, weights: Weights, moe: MoeConfig, how: SigmoidRouting
) -> SigmoidChoice:
    bias = weights.take(f"{to}router_bias", torch.float32)
    groups = how.groups, how.kept_groups
    return SigmoidChoice(bias, *groups, moe.top_k, moe.normalize, how.scale)


class _Stacked(NamedTuple):
    """Projection of all experts, which gpt-oss keeps in one tensor."""

    name: str
    experts: int
    outputs: int
    inputs: int
    input_major: bool  # [E, K, N], which plain weights are; quantised ones are [E, N, K]

    def weight(self, expert: int, keep: slice, dim: int) -> Parameter:
        """Return the parameter of what is kept of an expert: outputs (dim 0) or inputs (dim 1)."""
        shape = [self.outputs, self.inputs]
        if self.input_major:
            shape, dim = shape[::-1], 1 - dim
        source = TensorSource(
            self.name, (self.experts, *shape), keep, dim, expert, input_major=self.input_major
        )
        shape[dim] = keep.stop - keep.start
        return Parameter((shape[0], shape[1]), (source,), linear=True)

    def bias(self, expert: int, keep: slice) -> Parameter:
        """Return the bias of the outputs that are kept; if none are, zeros for all outputs."""
        source = TensorSource(f"{self.name}_bias", (self.experts, self.outputs), keep, item=expert)
        return Parameter((source.numel or self.outputs,), (source,))


def gpt_oss_moe_table(
    to: str, at: str, config: RoutedConfig, shard: Sharding, names: Set[str]
) -> dict[str, Parameter]:
    """Return the parameters of gpt-oss's layer whose tensors begin with `at`.

    The outputs of an expert's first projection are pairs of a gate and an up; ranks that share out
    columns keep whole pairs.
    """
    count, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    router = [(f"{at}router", ShardSlice(count, slice(0, count)))]
    table = shard.columns(f"{to}router", router, width, bias=True, exact=True)
    gate_up = _stacked(f"{at}experts.gate_up_proj", count, 2 * inner, width, names)
    down = _stacked(f"{at}experts.down_proj", count, width, inner, names)
    keep = _columns(config, shard)
    # The sum over the ranks has each bias once: with tensor parallelism the last one is rank 0's.
    biased = slice(0, width if shard.expert_parallel or shard.tp.rank == 0 else 0)
    pairs = slice(2 * keep.start, 2 * keep.stop)
    for expert in local_experts(count, shard):
        table |= {
            f"{to}{expert}.gate_up.weight": gate_up.weight(expert, pairs, dim=0),
            f"{to}{expert}.gate_up.bias": gate_up.bias(expert, pairs),
            f"{to}{expert}.down.weight": down.weight(expert, keep, dim=1),
            f"{to}{expert}.down.bias": down.bias(expert, biased),
        }
    return table


def _columns(config: RoutedConfig, shard: Sharding) -> slice:
    """Return this rank's columns of an expert."""
    inner, block = config.intermediate_size, config.column_block
    return slice(0, inner) if shard.expert_parallel else shard.even_part(inner // block, block).keep


def _stacked(name: str, experts: int, outputs: int, inputs: int, names: Set[str]) -> _Stacked:
    input_major = names.isdisjoint((f"{name}_blocks", f"{name}_scales"))
    return _Stacked(name, experts, outputs, inputs, input_major)


class GptOssMoe:
    """This rank's share of gpt-oss's experts: each token uses those with its highest scores.

    Their weights are the softmax of these scores alone.
    """

    def __init__(self, to: str, context: LayerContext[RoutedConfig]) -> None:
        config, weights, kernels = context.config, context.weights, context.kernels
        self._ops = kernels
        scores = take_linear(weights, f"{to}router", kernels)
        self._router = Router(scores, None, config.num_experts_per_tok, normalize=True)
        experts = local_experts(config.num_local_experts, context.shard)
        gate_up = [_take_expert(weights, f"{to}{i}.gate_up", kernels, pairs=True) for i in experts]
        down = [_take_expert(weights, f"{to}{i}.down", kernels, pairs=False) for i in experts]
        limit = config.swiglu_limit
        self._experts = kernels.pack_experts(gate_up, down, experts.start, limit)
        inner, width = config.intermediate_size, config.hidden_size
        stack = Stack(config.num_local_experts, inner, width, paired=True)
        _adapt(to, context, self._experts, stack, _columns(config, context.shard))

    def __call__(self, x: Tensor) -> Mixed:
        """Return this rank's share [T, H] for x [T, H], to be summed over the ranks."""
        return Mixed(self._ops.route_tokens(x, self._router, None), self._experts)


def _take_expert(weights: Weights, name: str, kernels: KernelSet, *, pairs: bool) -> PackedLinear:
    """Read a projection of an expert. `pairs` of outputs are parted: all gates, then all ups."""

    def pack(checkpoint: CheckpointWeights) -> PackedLinear:
        bias, weight = checkpoint.take(f"{name}.bias"), checkpoint.take_linear(f"{name}.weight")
        order = torch.arange(len(bias))
        if pairs:
            order = order.view(-1, 2).T.flatten()
        if isinstance(weight, QuantizedWeight):
            return kernels.pack_quantized(weight.rows(order), bias[order])
        return kernels.pack_linear(weight.T[order], bias[order])

    return weights.take_packed(name, pack)
