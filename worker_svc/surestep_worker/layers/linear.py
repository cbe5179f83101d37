"""Linear layers shared out among ranks: which slices a rank reads, and how they are packed.

Column-parallel layers keep some of the outputs, row-parallel layers some of the inputs; a pair of
them needs one all-reduce (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from torch import Tensor

from surestep_worker.adapters.kernels import AdaptedKernels, AdaptedProduct
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.distributed.tensor_parallel import TensorParallel

_EXACT = 32  # bits that rounding must leave


class ShardSlice(NamedTuple):
    """A dimension of the whole model and the slice of it on this rank."""

    total: int
    keep: slice

    @property
    def size(self) -> int:
        """Length of the slice."""
        return int(self.keep.stop - self.keep.start)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Builds the table entries of one rank."""

    tp: TensorParallel
    expert_parallel: bool = False  # ranks share out whole experts, not the columns of each

    def part(self, count: int, unit: int = 1) -> ShardSlice:
        """This rank's share of `count` things of `unit` elements; with fewer things than ranks,
        neighbouring ranks hold the same one."""
        first = self.tp.rank * count // self.tp.size
        kept = max(1, count // self.tp.size)
        return ShardSlice(count * unit, slice(first * unit, (first + kept) * unit))

    def even_part(self, count: int, unit: int = 1) -> ShardSlice:
        """Return this rank's share of `count` things of `unit` elements, as even as they go."""
        rank, size = self.tp.rank, self.tp.size
        first, end = rank * count // size, (rank + 1) * count // size
        return ShardSlice(count * unit, slice(first * unit, end * unit))

    def whole(self, name: str, size: int) -> Parameter:
        """A vector that every rank holds."""
        return self.vector(name, ShardSlice(size, slice(0, size)))

    def vector(self, name: str, part: ShardSlice) -> Parameter:
        """Part of a vector."""
        return Parameter((part.size,), (TensorSource(name, (part.total,), part.keep),))

    def vocabulary(self, name: str, vocab_size: int, width: int) -> Parameter:
        """Equal numbers of rows on every rank, the last ones padded with zeros."""
        rows = -(-vocab_size // self.tp.size)
        first = min(self.tp.rank * rows, vocab_size)
        keep = slice(first, min(first + rows, vocab_size))
        return Parameter((rows, width), (TensorSource(name, (vocab_size, width), keep),))

    def columns(
        self,
        name: str,
        outputs: Sequence[tuple[str, ShardSlice]],
        inputs: int,
        *,
        bias: bool,
        exact: bool = False,
    ) -> dict[str, Parameter]:
        """Column-parallel layers of one input, merged in the given order.

        A layer may be named more than once, with another part of it each time. `exact` ones are
        never rounded.
        """
        rows = sum(part.size for _, part in outputs)
        weight = Parameter(
            (rows, inputs),
            tuple(TensorSource(f"{n}.weight", (p.total, inputs), p.keep) for n, p in outputs),
            linear=True,
        )
        if exact:
            weight = weight._replace(least_bits=_EXACT)
        if not bias:
            return {f"{name}.weight": weight}
        biases = tuple(TensorSource(f"{n}.bias", (p.total,), p.keep) for n, p in outputs)
        return {f"{name}.weight": weight, f"{name}.bias": Parameter((rows,), biases)}

    def rows(
        self, name: str, source: str, outputs: int, inputs: ShardSlice, *, bias: bool
    ) -> dict[str, Parameter]:
        """A row-parallel layer. Only rank 0 has the bias: the all-reduce adds it for everyone."""
        kept = TensorSource(f"{source}.weight", (outputs, inputs.total), inputs.keep, dim=1)
        weight = Parameter((outputs, inputs.size), (kept,), linear=True)
        if not bias:
            return {f"{name}.weight": weight}
        keep = slice(0, outputs if self.tp.rank == 0 else 0)
        vector = Parameter((outputs,), (TensorSource(f"{source}.bias", (outputs,), keep),))
        return {f"{name}.weight": weight, f"{name}.bias": vector}


def are_alike(modules: Iterable[str], names: Set[str]) -> bool:
    """Return whether a checkpoint keeps the weights of all modules in one form."""
    parts = "weight", "weight_scale", "weight_scale_inv", "weight_packed", "qweight"
    return len({tuple(f"{module}.{part}" in names for part in parts) for module in modules}) == 1


def take_linear(weights: Weights, name: str, kernels: KernelSet) -> PackedLinear:
    """Read a linear layer, quantised or not, and keep it in the kernels' layout only.

    Adapted kernels may have adapters for it: see `plain_kernels`.
    """

    def read(checkpoint: CheckpointWeights) -> PackedLinear:
        bias = checkpoint.take(f"{name}.bias") if f"{name}.bias" in checkpoint else None
        return pack(kernels, checkpoint.take_linear(f"{name}.weight"), bias, checkpoint.dtype)

    packed = weights.take_packed(name, read)
    if isinstance(kernels, AdaptedKernels):
        kernels.rows.products[name] = AdaptedProduct(packed, [weights.pieces(name)])
    return packed


def pack(
    kernels: KernelSet,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> PackedLinear:
    """Lay out a weight as it is, or in `dtype` if the kernels have no such product."""
    if not isinstance(weight, QuantizedWeight):
        return kernels.pack_linear(weight, bias)
    if weight.mins is not None and not kernels.affine:
        return kernels.pack_linear(weight.dequantize().to(dtype), bias)
    return kernels.pack_quantized(weight, bias)
