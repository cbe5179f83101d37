"""Routed experts beside one shared expert.

The ranks share out either the columns of every expert (tensor parallel) or the experts themselves
(expert parallel); the sum over the ranks is the same.
"""

from __future__ import annotations

from collections.abc import Set

from surestep_kernels.ops.moe import Router
from torch import Tensor

from surestep_worker.checkpoint.parameters import Parameter, TensorSource
from surestep_worker.configs.hybrid import HybridConfig, MoeConfig

from .context import LayerContext
from .linear import Sharding, ShardSlice, are_alike, take_linear
from .mlp import mlp_table
from .residual import Mixed


def local_experts(moe: MoeConfig, shard: Sharding) -> range:
    """The experts of which this rank holds weights."""
    if not shard.expert_parallel:
        return range(moe.num_experts)
    keep = shard.part(moe.num_experts).keep
    return range(keep.start, keep.stop)


def moe_table(
    to: str, at: str, config: HybridConfig, shard: Sharding, names: Set[str]
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`, of a checkpoint with these `names`.

    It holds two tensors with all experts, or three per expert. The gate of the shared expert is the
    last output of the router, if both are kept in one form.
    """
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    fused = f"{at}experts.gate_up_proj" in names
    experts = (_fused_experts if fused else _separate_experts)(to, at, config, shard)
    router = [(f"{at}gate", ShardSlice(moe.num_experts, slice(0, moe.num_experts)))]
    gate = [(f"{at}shared_expert_gate", ShardSlice(1, slice(0, 1)))]
    if are_alike([name for name, _ in (*router, *gate)], names):
        projections = shard.columns(f"{to}router", [*router, *gate], width, bias=False)
    else:
        projections = shard.columns(f"{to}router", router, width, bias=False)
        projections |= shard.columns(f"{to}shared_gate", gate, width, bias=False)
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

    def cut(name: str, expert: int, columns: slice, dim: int) -> TensorSource:
        return TensorSource(f"{at}experts.{name}", shapes[name], columns, dim, item=expert)

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
        self._ops = kernels
        scores, apart = take_linear(weights, f"{to}router", kernels), f"{to}shared_gate" in weights
        gate = take_linear(weights, f"{to}shared_gate", kernels) if apart else None
        self._router = Router(scores, gate, moe.top_k, moe.normalize)
        self._shared_gate_up = take_linear(weights, f"{to}shared.gate_up", kernels)
        self._shared_down = take_linear(weights, f"{to}shared.down", kernels)
        experts = local_experts(moe, context.shard)
        gate_up = [take_linear(weights, f"{to}{i}.gate_up", kernels) for i in experts]
        down = [take_linear(weights, f"{to}{i}.down", kernels) for i in experts]
        self._experts = kernels.pack_experts(gate_up, down, experts.start)

    def __call__(self, x: Tensor) -> Mixed:
        """[T, H] -> [T, H], to be summed over the ranks.

        The experts of a token are added in the order of their numbers, whatever its neighbours.
        """
        mixture = self._ops.route_tokens(x, self._router, self._shared_gate_up)
        return Mixed(mixture, self._experts, self._shared_down)
