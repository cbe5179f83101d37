"""The kernels that multiply by weights: one family serves all numbers of rows.

Within a family a row's bits do not depend on the number of rows; between families they do. So one
family is chosen for the life of a worker, and for all ranks of a group. It is of unquantised
weights; quantised ones are multiplied by instructions of one width, or of several that add alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum

import torch
from torch import Tensor

from surestep_kernels.linear import PackedLinear, linear_reference
from surestep_kernels.linear.sequential import (
    BORDERS,
    SERVED,
    multiply_into,
    sequential_linear,
    tile_of,
)
from surestep_kernels.linear.splits import PartialSums, sum_partials
from surestep_kernels.linear.triton import ALL_WIDTHS, ONE_WIDTH, linear_partials

PIECE = 256  # rows: cuBLAS is given multiples of it
MOST_PIECES = 8
_ALIGNMENT = 256  # bytes; cuBLAS may use another kernel for other alignments
Shape = tuple[int, int]  # of a weight: N, K


class ProductFamily(StrEnum):
    """Families by their names in --linear-backend."""

    SPLITS = "triton"  # linear/plain.py
    SEQUENTIAL = "triton_sequential"  # linear/sequential.py
    CUBLAS = "torch"  # which breaks the promise above


class Products:
    """`linear` of a KernelSet, and `linear_partials`, by the family that a backend names.

    "auto" means the family of splits, until `use` selects another one after the GPU has been
    probed.
    """

    def __init__(self, backend: str = "auto", *, fp8_rows: bool = False) -> None:
        """With `fp8_rows`, FP8 weights are multiplied by activations in FP8 (W8A8)."""
        self.is_open = backend == "auto"  # no family was named
        self.family = ProductFamily.SPLITS if self.is_open else ProductFamily(backend)
        self.fp8_rows = fp8_rows
        self.widths: tuple[int, ...] = ONE_WIDTH  # of instructions, for quantised weights
        self._cublas: Set[Shape] = frozenset()
        self._weights: dict[tuple[object, ...], PackedLinear] = {}

    def register(self, weights: Iterable[PackedLinear]) -> None:
        """Register the model's weights; one of each kind is kept until `use`."""
        for packed in weights:
            if not self.is_open:
                continue
            if packed.scales is not None:
                self._weights.setdefault((packed.format, packed.group_size), packed)
            elif packed.data.dtype is SERVED:
                kind = packed.data.shape, packed.data.dtype, packed.bias is None
                self._weights.setdefault(kind, packed)

    @property
    def weights(self) -> list[PackedLinear]:
        """Registered weights, one of each kind that is multiplied in a way of its own."""
        return list(self._weights.values())

    def use(
        self, family: ProductFamily, cublas: Set[Shape] = frozenset(), *, narrow: bool = False
    ) -> None:
        """Select the family, before the first product. cuBLAS multiplies many rows by weights of
        the shapes `cublas`, for which it was found to give the family's bits. With `narrow`, few
        rows are multiplied by quantised weights with instructions that are as narrow."""
        self.family, self._cublas = family, cublas
        self.widths = ALL_WIDTHS if narrow else ONE_WIDTH
        self._weights.clear()

    def linear(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return sum_partials(self.partials(x, packed, out_dtype))

    def partials(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> PartialSums:
        """Return the product before its last steps. Types other than SERVED use splits in both
        families."""
        if packed.scales is None and self.family is ProductFamily.CUBLAS:
            return PartialSums.whole(linear_reference(x, packed, out_dtype))
        plain = packed.scales is None and x.dtype is SERVED
        if not plain or self.family is ProductFamily.SPLITS:
            return linear_partials(x, packed, out_dtype, self.widths, fp8_rows=self.fp8_rows)
        if len(x) > BORDERS[-1] and out_dtype is None and self._is_checked(x, packed):
            return PartialSums.whole(in_pieces(x, packed))
        return PartialSums.whole(sequential_linear(x, packed, out_dtype))

    def _is_checked(self, x: Tensor, packed: PackedLinear) -> bool:
        shape = packed.out_features, packed.in_features
        return shape in self._cublas and packed.bias is None and is_aligned(x)


def in_pieces(x: Tensor, packed: PackedLinear) -> Tensor:
    """Multiply by cuBLAS in pieces of as many rows as were probed, and the rest by a tile of the
    family.

    cuBLAS chooses its kernel by the number of rows, so it is given only numbers that were probed.
    """
    y = x.new_empty(len(x), packed.out_features)
    whole = len(x) - len(x) % PIECE
    for first in range(0, whole, MOST_PIECES * PIECE):
        rows = slice(first, min(first + MOST_PIECES * PIECE, whole))
        torch.mm(x[rows], packed.data.T, out=y[rows])
    multiply_into(y[whole:], x[whole:], packed, tile_of(len(x) - whole, packed))
    return y


def is_aligned(x: Tensor) -> bool:
    """Return whether x is aligned as whole allocations are."""
    return x.data_ptr() % _ALIGNMENT == 0
