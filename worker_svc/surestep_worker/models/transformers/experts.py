"""Routed experts of transformers' modules, computed by our products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, PackedLinear
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from surestep_worker.adapters.kernels import AdaptedKernels, Stack
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.linear import Sharding, ShardSlice
from surestep_worker.layers.moe import local_experts

from .curves import Aligned
from .names import CheckpointNames, Stored

EXPERTS = "surestep_experts"  # attribute of a module that has experts: what computes them
STACKS = "surestep_stacks"  # of one whose parameters have the rows of all experts: their names


def run_experts(
    module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return [T, H]: for hidden [T, H] the sum of its experts [T, k], times their weights."""
    if hidden.is_meta:
        return torch.empty_like(hidden)
    experts: Any = getattr(module, EXPERTS)
    made: Tensor = experts(hidden, top_k_index, top_k_weights.float())
    return made


class Projection(NamedTuple):
    """A parameter with a weight of every expert, and the part of it that a rank has."""

    attribute: str
    experts: int
    outputs: int
    inputs: int
    input_major: bool  # [E, K, N]
    bias: bool
    keep: tuple[slice, ...]
    of_inputs: bool = False  # `keep` are some of these
    biased: bool = True  # on this rank
    stacks: tuple[str, ...] = ()  # in its place: parameters with the rows of all experts

    @property
    def parts(self) -> int:
        """Number of parts that lie one below the other in a parameter, of those in the table."""
        return len(self.keep)

    def parameter(self, module: str, names: CheckpointNames, expert: int) -> Parameter:
        """Return the weight of an expert, which the checkpoint has apart or with all others."""
        stored = [names.of(f"{module}.{name}") for name in self.stacks or (self.attribute,)]
        source_of = self._of_stack if self.stacks else self._source_of
        sources = tuple(source_of(stored, expert, keep) for keep in self.keep)
        shape, dim = [self.outputs, self.inputs], int(self.of_inputs)
        shape[dim] = _length(self.keep)
        if self.input_major:
            shape = [self.parts * shape[1], shape[0] // self.parts]
        return Parameter((shape[0], shape[1]), sources, linear=True)

    def _source_of(self, all_stored: Sequence[Stored], expert: int, keep: slice) -> TensorSource:
        (stored,) = all_stored
        if stored.by_expert:
            return self._apart(stored, expert, keep)
        shape = [self.outputs, self.inputs]
        return TensorSource(
            stored.names[0],
            (self.experts, *(shape[::-1] if self.input_major else shape)),
            keep,
            int(self.of_inputs != self.input_major),
            expert,
            input_major=self.input_major,
        )

    def _of_stack(self, all_stored: Sequence[Stored], expert: int, keep: slice) -> TensorSource:
        """Return a part of a weight whose rows lie among those of all experts."""
        shape = (self.inputs, self.outputs) if self.input_major else (self.outputs, self.inputs)
        rows = shape[0] // len(all_stored)
        stack, first = divmod(keep.start, rows)
        first += expert * rows
        return TensorSource(
            all_stored[stack].names[0],
            (rows * self.experts, shape[1]),
            slice(first, first + keep.stop - keep.start),
            input_major=self.input_major,
        )

    def _apart(self, stored: Stored, expert: int, keep: slice) -> TensorSource:
        """Return a part of a weight whose parts, one below the other, are tensors of their own."""
        parts = len(stored.names) // self.experts
        if self.input_major or len(stored.names) != parts * self.experts or self.outputs % parts:
            raise InvalidRequest(
                f"{len(stored.names)} tensors for the {self.attribute} of {self.experts} experts",
                param="model",
            )
        rows = self.outputs // parts
        if self.of_inputs:
            return TensorSource(stored.names[expert], (rows, self.inputs), keep, dim=1)
        part, first = divmod(keep.start, rows)
        keep = slice(first, first + keep.stop - keep.start)
        return TensorSource(stored.names[expert * parts + part], (rows, self.inputs), keep)

    def bias_of(self, stored: Stored, expert: int) -> Parameter:
        """Return the bias of an expert."""
        keep = (slice(0, self.outputs if self.biased else 0),) if self.of_inputs else self.keep
        shape = self.experts, self.outputs
        sources = tuple(TensorSource(stored.names[0], shape, it, item=expert) for it in keep)
        return Parameter((_length(keep) or self.outputs,), sources)


def _length(slices: Iterable[slice]) -> int:
    return sum(it.stop - it.start for it in slices)


def projections_of(module: Any, shard: Sharding) -> tuple[Projection, Projection]:
    """Return the first and the last projection of a module that has experts.

    Ranks share out the columns of each expert, or whole experts.
    """
    first, last = _whole_projections(module)
    whole = ShardSlice(last.inputs, slice(0, last.inputs))
    keep = (whole if shard.expert_parallel else shard.part(last.inputs)).keep
    biased = shard.expert_parallel or shard.tp.rank == 0
    last = last._replace(keep=(keep,), of_inputs=True, biased=biased)
    if not module.has_gate:
        return first._replace(keep=(keep,)), last
    if not module.is_concatenated:
        return first._replace(keep=(slice(2 * keep.start, 2 * keep.stop),)), last
    ups = slice(last.inputs + keep.start, last.inputs + keep.stop)
    return first._replace(keep=(keep, ups)), last


def _whole_projections(module: Any) -> tuple[Projection, Projection]:
    """Return both projections as one rank has them."""
    if not hasattr(module, STACKS):
        first = "gate_up_proj" if module.has_gate else "up_proj"
        return _projection(module, first), _projection(module, "down_proj")
    experts, hidden, inner = module.num_experts, module.hidden_size, module.ffn_hidden_size
    up, down = getattr(module, STACKS)
    rows, columns = (slice(0, 2 * inner),), (slice(0, hidden),)
    return (
        Projection("gate_up_proj", experts, 2 * inner, hidden, False, False, rows, stacks=up),
        Projection("down_proj", experts, hidden, inner, True, False, columns, stacks=down),
    )


def _projection(module: Any, attribute: str) -> Projection:
    experts, rows, columns = getattr(module, attribute).shape
    if module.is_transposed:
        rows, columns = columns, rows
    layout = module.is_transposed, module.has_bias
    return Projection(attribute, experts, rows, columns, *layout, (slice(0, rows),))


def sizes_of(module: Any) -> tuple[int, int]:
    """Return the number of experts of a module, and the columns of each."""
    last = _whole_projections(module)[1]
    return last.experts, last.inputs


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that have experts, by name.

    Raises InvalidRequest for one that computes more than ours do.
    """
    found = {name: it for name, it in model.named_modules() if hasattr(it, "_is_expert_parallel")}
    for module in found.values():
        if module.has_post_expert_norm:
            raise InvalidRequest("experts with norms of their own are not served", param="model")
    return found


class Experts:
    """Experts of a layer. Each token's are added in the order of their numbers."""

    def __init__(self, name: str, module: Any, context: LayerContext[Any]) -> None:
        """Take the weights that the table has for the module `name`."""
        weights, kernels = context.weights, context.kernels
        first, last = projections_of(module, context.shard)
        self._module, self._kernels, self._tp = module, kernels, context.shard.tp
        self._own = local_experts(first.experts, context.shard)
        up, down = (
            [_take(weights, f"{name}.{i}.{it.attribute}", it, kernels) for i in self._own]
            for it in (first, last)
        )
        self._up, self._down = up, down
        self._packed = None
        if _is_usual(module):
            self._packed = kernels.pack_experts(up, down, self._own.start)
            if isinstance(kernels, AdaptedKernels) and not hasattr(module, STACKS):
                stack = Stack(first.experts, last.inputs, last.outputs)
                kernels.rows.adapt_experts(name, name, self._packed, stack, *last.keep)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return [T, H] of x [T, H], experts i64[T, k] and their weights f32[T, k]."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self._packed is not None:
            self._kernels.moe(total, x.contiguous(), weights.contiguous(), experts, self._packed)
        else:
            self._add_one_by_one(total, x, experts, weights)
        return self._tp.all_reduce(total.to(x.dtype))

    def _add_one_by_one(self, total: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Add experts whose activation is the module's own."""
        linear, module = self._kernels.linear, self._module
        for expert in experts.unique().tolist():
            if expert not in self._own:
                continue
            token, choice = (experts == expert).nonzero(as_tuple=True)
            up, down = (its[expert - self._own.start] for its in (self._up, self._down))
            made = linear(x[token], up)
            inner = module._apply_gate(made) if module.has_gate else module.act_fn(made)
            out = linear(inner.contiguous(), down, out_dtype=torch.float32)
            total[token] += out * weights[token, choice, None]


def _is_usual(module: Any) -> bool:
    """Return whether experts are down(silu(gate(x)) * up(x)), which is one op."""
    gate = getattr(type(module), "_apply_gate", moe._default_apply_gate)
    usual = gate is moe._default_apply_gate
    if not (module.has_gate and module.is_concatenated and usual):
        return False
    act: Any = module.mlp.activation_fn if hasattr(module, STACKS) else module.act_fn
    act = act.inner if isinstance(act, Aligned) else act
    return type(act) is type(ACT2FN["silu"])


def _take(weights: Weights, name: str, it: Projection, kernels: KernelSet) -> PackedLinear:
    def pack(checkpoint: CheckpointWeights) -> PackedLinear:
        bias = checkpoint.take(f"{name}.bias") if it.bias else None
        weight = checkpoint.take_linear(f"{name}.weight")
        if not isinstance(weight, Tensor):
            return kernels.pack_quantized(weight, bias)
        if it.input_major:
            weight = weight.unflatten(0, (it.parts, -1)).transpose(1, 2).flatten(0, 1)
        return kernels.pack_linear(weight, bias)

    return weights.take_packed(name, pack)
