"""Routed experts beside one shared expert.

The ranks share out either the columns of every expert (tensor parallel) or the experts themselves
(expert parallel); the sum over the ranks is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surestep_worker.checkpoint.parameters import Parameter, Source
from surestep_worker.configs.hybrid import HybridConfig, MoeConfig

from .context import LayerContext
from .linear import Part, Sharding, take_linear
from .mlp import GatedMlp, mlp_table


def local_experts(moe: MoeConfig, shard: Sharding) -> range:
    """The experts of which this rank holds weights."""
    if not shard.expert_parallel:
        return range(moe.num_experts)
    keep = shard.part(moe.num_experts).keep
    return range(keep.start, keep.stop)


def moe_table(
    to: str, at: str, config: HybridConfig, shard: Sharding, *, fused: bool
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`.

    `fused`: the checkpoint holds two tensors with all experts, not three per expert.
    """
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    experts = (_fused_experts if fused else _separate_experts)(to, at, config, shard)
    router = [(f"{at}gate", Part(moe.num_experts, slice(0, moe.num_experts)))]
    gate = [(f"{at}shared_expert_gate", Part(1, slice(0, 1)))]
    return {
        **shard.columns(f"{to}router", router, width, bias=False),
        **shard.columns(f"{to}shared_gate", gate, width, bias=False),
        **mlp_table(f"{to}shared.", f"{at}shared_expert.", width, moe.shared_expert_size, shard),
        **experts,
    }


def _inner(moe: MoeConfig, shard: Sharding) -> Part:
    """This rank's columns of an expert."""
    whole = Part(moe.expert_size, slice(0, moe.expert_size))
    return whole if shard.expert_parallel else shard.part(moe.expert_size)


def _separate_experts(
    to: str, at: str, config: HybridConfig, shard: Sharding
) -> dict[str, Parameter]:
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    part, table = _inner(moe, shard), dict[str, Parameter]()
    for expert in local_experts(moe, shard):
        name = f"{at}experts.{expert}."
        gate_up = [(f"{name}gate_proj", part), (f"{name}up_proj", part)]
        table |= shard.columns(f"{to}{expert}.gate_up", gate_up, width, bias=False)
        table |= shard.rows(f"{to}{expert}.down", f"{name}down_proj", width, part, bias=False)
    return table


def _fused_experts(to: str, at: str, config: HybridConfig, shard: Sharding) -> dict[str, Parameter]:
    """One parameter per expert and projection, cut out of the tensors of all experts."""
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    inner, count, table = moe.expert_size, moe.num_experts, dict[str, Parameter]()
    keep = _inner(moe, shard).keep
    shapes = {"gate_up_proj": (count, 2 * inner, width), "down_proj": (count, width, inner)}

    def cut(name: str, expert: int, columns: slice, dim: int) -> Source:
        return Source(f"{at}experts.{name}", shapes[name], columns, dim, item=expert)

    for expert in local_experts(moe, shard):
        up = slice(inner + keep.start, inner + keep.stop)
        gate_up = (cut("gate_up_proj", expert, part, 0) for part in (keep, up))
        size = keep.stop - keep.start
        table[f"{to}{expert}.gate_up.weight"] = Parameter((2 * size, width), tuple(gate_up))
        down = cut("down_proj", expert, keep, 1)
        table[f"{to}{expert}.down.weight"] = Parameter((width, size), (down,))
    return table


class SparseMoe:
    """This rank's share of the routed and the shared experts."""

    def __init__(self, to: str, context: LayerContext[HybridConfig]) -> None:
        moe, weights, kernels = context.config.moe, context.weights, context.kernels
        assert moe is not None
        self._moe = moe
        self._ops = kernels
        self._router = take_linear(weights, f"{to}router", kernels)
        self._shared_gate = take_linear(weights, f"{to}shared_gate", kernels)
        self._shared = GatedMlp(f"{to}shared.", context)
        experts = local_experts(moe, context.shard)
        gate_up = [take_linear(weights, f"{to}{i}.gate_up", kernels) for i in experts]
        down = [take_linear(weights, f"{to}{i}.down", kernels) for i in experts]
        self._experts = kernels.pack_experts(gate_up, down, experts.start)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], to be summed over the ranks.

        The experts of a token are added in the order of their numbers, whatever its neighbours.
        """
        ops, moe = self._ops, self._moe
        shared = ops.linear(*self._shared(x))
        ops.mul_sigmoid(shared, ops.linear(x, self._shared_gate))
        logits = ops.linear(x, self._router, out_dtype=torch.float32)
        weights, experts = ops.route(logits, moe.top_k, normalize=moe.normalize)
        total = shared.float()
        ops.moe(total, x, weights, experts, self._experts)
        return total.to(x.dtype)
