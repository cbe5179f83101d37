"""Matrices cut among ranks: the part of a rank, and how the parts of a product come together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.linear import Sharding, ShardSlice


class Cut(Enum):
    """Part of a matrix that a rank has."""

    WHOLE = auto()
    APART = auto()  # some outputs, which the module goes on with
    GATHERED = auto()  # some outputs; the module gets those of all ranks
    SUMMED = auto()  # some inputs, which the module has; it gets the sum of all ranks
    SPLIT = auto()  # the same, out of all inputs

    @property
    def of_inputs(self) -> bool:
        """Return whether ranks have different inputs."""
        return self in (Cut.SUMMED, Cut.SPLIT)


def seen_shape(
    shape: Sequence[int], cut: Cut, size: int, *, input_major: bool = False
) -> tuple[int, ...]:
    """Return the shape of a matrix as its module sees it."""
    seen, dim = list(shape), int(cut.of_inputs != input_major)
    if cut in (Cut.APART, Cut.SUMMED):
        seen[dim] //= size
    return tuple(seen)


def divides(shape: Sequence[int], cut: Cut, size: int, *, input_major: bool = False) -> bool:
    """Return whether ranks have equal parts of a matrix."""
    return cut is Cut.WHOLE or not shape[int(cut.of_inputs != input_major)] % size


def cut_weight(
    whole: Parameter, cut: Cut, shard: Sharding, *, input_major: bool = False
) -> Parameter:
    """Return the parameter of a rank's part of a matrix, or of a vector's with a Cut.APART."""
    if cut is Cut.WHOLE or shard.tp.size == 1:
        return whole
    shape, dim = list(whole.shape), int(cut.of_inputs != input_major)
    part = shard.part(shape[dim])
    shape[dim] = part.size
    source = whole.sources[0]._replace(keep=part.keep, dim=dim)
    return whole._replace(shape=tuple(shape), sources=(source,))


def cut_bias(whole: Parameter, cut: Cut, shard: Sharding) -> Parameter:
    """Return the parameter of a rank's part of a matrix's bias, which a sum has from rank 0."""
    if not cut.of_inputs:
        return cut_weight(whole, cut, shard)
    keep = slice(0, whole.shape[0] if shard.tp.rank == 0 else 0)
    return whole._replace(sources=(whole.sources[0]._replace(keep=keep),))


class Joint(NamedTuple):
    """Place where the ranks' parts of a product come together."""

    cut: Cut
    tp: TensorParallel

    def mine(self, x: Tensor) -> Tensor:
        """Return this rank's inputs [T, K'] of those that the module has."""
        if self.cut is not Cut.SPLIT:
            return x
        return x.tensor_split(self.tp.size, dim=1)[self.tp.rank]

    def whole(self, made: Tensor) -> Tensor:
        """Return the product that the module gets, of a rank's own [T, N']."""
        if self.cut is Cut.GATHERED:
            return self.tp.all_gather(made)
        return self.tp.all_reduce(made) if self.cut.of_inputs else made

    def parted(self, whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return products of several matrices, of which a rank has `sizes` outputs in one."""
        ranks = self.tp.size if self.cut is Cut.GATHERED else 1
        by_rank = torch.split(whole.view(len(whole), ranks, -1), list(sizes), dim=2)
        return [part.flatten(1) for part in by_rank]


class Heads(NamedTuple):
    """Heads of a layer, of which a rank attends to its own."""

    tp: TensorParallel
    queries: ShardSlice
    in_cache: ShardSlice  # of keys and values: a multiple of the layer's

    def are_whole(self, count: int) -> bool:
        """Return whether so many heads of queries are those of several ranks."""
        return self.tp.size > 1 and count == self.queries.total

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return those heads of queries [.., H, ..] that are this rank's."""
        return x.narrow(dim, self.queries.keep.start, self.queries.size)

    def kept(self, x: Tensor, *, whole: bool) -> Tensor:
        """Return the heads [1, H, T, D] of this rank's cache, of keys or values."""
        copies = (self.in_cache.total if whole else self.in_cache.size) // x.shape[1]
        if copies > 1:
            x = x.repeat_interleave(copies, dim=1)
        return x[:, self.in_cache.keep] if whole else x

    def gathered(self, out: Tensor) -> Tensor:
        """Return [T, H, D] of all ranks, given those of this one."""
        return self.tp.all_gather(out.flatten(1)).view(len(out), -1, out.shape[2])
