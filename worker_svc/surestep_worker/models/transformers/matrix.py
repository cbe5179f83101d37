"""Weights in the place of a module's own: what a forward pass multiplies by them is our product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, PackedLinear
from torch import Tensor
from torch.nn import functional

from surestep_worker.layers.embedding import Embedding

from .cuts import Joint


@dataclass(slots=True)
class Use:
    """Use of a weight in a forward pass, as a trace saw it."""

    input_major: bool = False  # [K, N]: the weight is the right side of a product
    multiplied: bool = False
    wide: bool = False  # it is multiplied in float32, by a model that is computed in bfloat16
    otherwise: str = ""  # the first op on it that is no product
    inputs: list[Tensor] = field(default_factory=list)  # while it is traced: what it multiplies


class Siblings:
    """Weights that a module multiplies one and the same tensor by, in one product."""

    def __init__(
        self, packed: PackedLinear, kernels: KernelSet, sizes: Sequence[int], joint: Joint
    ) -> None:
        """`sizes`: outputs of each on this rank."""
        self._packed, self._kernels, self._sizes = packed, kernels, sizes
        self._joint = joint
        self._x: Tensor | None = None  # of which the products are
        self._made: Sequence[Tensor] = ()

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self._packed.data.device

    def product(self, number: int, x: Tensor) -> Tensor:
        """Return x [.., K] times the weight of this number."""
        if x is not self._x:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            made = self._kernels.linear(rows, self._packed, out_dtype=x.dtype)
            self._x, self._made = x, self._joint.parted(self._joint.whole(made), self._sizes)
        mine = self._made[number]
        if number == len(self._sizes) - 1:  # nothing is kept for longer than it is of use
            self._x, self._made = None, ()
        return mine.view(*x.shape[:-1], -1)


class _StandIn(Tensor):
    """A tensor in the place of a module's own, of which some functions are ours."""

    ours: ClassVar[Mapping[Any, Callable[..., Any]]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        known = cls.ours.get(func)
        if known is not None:
            return known(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # what it returns is no weight
            return func(*args, **(kwargs or {}))


class Matrix(_StandIn):
    """A weight without elements. Products with it are noted on the meta device, else computed."""

    use: Use
    packed: PackedLinear | None
    joint: Joint
    kernels: KernelSet | None
    siblings: tuple[Siblings, int] | None  # its number among them

    @staticmethod
    def traced(like: Tensor) -> Matrix:
        """Return the weight of a model that is being traced."""
        return _matrix(tuple(like.shape), like.dtype, like.device, Use())

    @staticmethod
    def of(
        packed: PackedLinear,
        kernels: KernelSet,
        shape: Sequence[int],
        dtype: torch.dtype,
        use: Use,
        joint: Joint,
    ) -> Matrix:
        """Return a weight in the kernels' layout, which takes and gives numbers of `dtype`.

        `shape` is what its module sees of it.
        """
        matrix = _matrix(shape, dtype, packed.data.device, use)
        matrix.packed, matrix.kernels, matrix.joint = packed, kernels, joint
        return matrix

    @staticmethod
    def among(siblings: Siblings, number: int, shape: Sequence[int], dtype: torch.dtype) -> Matrix:
        """Return one [N, K] of the weights that are multiplied together."""
        matrix = _matrix(shape, dtype, siblings.device, Use())
        matrix.siblings = siblings, number
        return matrix

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        plain = [_noted(arg, str(func)) for arg in args]
        named = {name: _noted(arg, str(func)) for name, arg in (kwargs or {}).items()}
        return func(*plain, **named)

    def widened(self, *args: Any, **kwargs: Any) -> Matrix:
        """Return the weight itself, which shall be multiplied in another type.

        Raises InvalidRequest unless that is float32 or the weight's own.
        """
        asked = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)]
        if any(dtype not in (torch.float32, self.dtype) for dtype in asked):
            raise InvalidRequest(f"weights cast to {asked[0]} are not served", param="model")
        self.use.wide |= self.dtype is not torch.float32 and asked != [self.dtype]
        return self


class Rows(_StandIn):
    """The embedding of a model in the place of a module's own, which looks up in it."""

    embedding: Embedding

    @staticmethod
    def of(embedding: Embedding, shape: Sequence[int]) -> Tensor:
        """Return the table itself, where no rank has but a part of it."""
        table = embedding.table
        if embedding.tp.size == 1:
            return table
        rows: Rows = Tensor._make_wrapper_subclass(
            Rows, shape, dtype=table.dtype, device=table.device
        )
        rows.embedding = embedding
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs
        cls, func: Any, *args: Any, **kwargs: Any
    ) -> Any:
        raise InvalidRequest(f"{func} of an embedding is not served", param="model")


def _matrix(shape: Sequence[int], dtype: torch.dtype, device: torch.device, use: Use) -> Matrix:
    matrix: Matrix = Tensor._make_wrapper_subclass(Matrix, shape, dtype=dtype, device=device)
    matrix.use, matrix.packed, matrix.kernels, matrix.siblings = use, None, None, None
    return matrix


def _noted(arg: Any, op: str) -> Any:
    """Return an argument of an op that is no product: a weight of a trace as a plain tensor."""
    if not isinstance(arg, Matrix):
        return arg
    if arg.packed is not None or arg.siblings is not None:
        raise InvalidRequest(f"{op} of a weight is not served", param="model")
    arg.use.otherwise = arg.use.otherwise or op
    return torch.empty(arg.shape, dtype=arg.dtype, device="meta")


def _linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return x [.., K] times weight [N, K], plus its bias, as torch's linear."""
    return _product(x, weight, weight.shape[0], bias)


def _addmm(bias: Tensor, x: Tensor, weight: Matrix) -> Tensor:
    """Return x [T, K] times weight [K, N], plus its bias, as torch's addmm."""
    weight.use.input_major = True
    return _product(x, weight, weight.shape[1], bias)


def _product(x: Tensor, weight: Matrix, outputs: int, bias: Tensor | None) -> Tensor:
    if weight.siblings is not None:
        siblings, number = weight.siblings
        return siblings.product(number, x)
    if weight.packed is None or weight.kernels is None:
        if x.shape[-1] != weight.numel() // outputs:
            raise ValueError(f"{x.shape[-1]} inputs for a weight {tuple(weight.shape)}")
        weight.use.multiplied = True
        weight.use.inputs.append(x)
        weight.use.wide |= x.dtype is torch.float32
        return torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device="meta")
    rows = weight.joint.mine(x.reshape(-1, x.shape[-1])).contiguous()
    made = weight.joint.whole(weight.kernels.linear(rows, weight.packed, out_dtype=x.dtype))
    if bias is not None and weight.packed.bias is None:
        made += bias
    return made.view(*x.shape[:-1], outputs)


def _look_up(ids: Tensor, rows: Rows, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of ids, as torch's embedding."""
    return rows.embedding(ids.flatten()).view(*ids.shape, -1)


Rows.ours = {functional.embedding: _look_up}
Matrix.ours = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    Tensor.to: Matrix.widened,
    Tensor.type: Matrix.widened,
    Tensor.float: lambda weight: Matrix.widened(weight, torch.float32),
}
