"""Matrix instructions as a card has them, for Triton's interpreter, whose own products are NumPy's.

Each adds the exact sum of 16 products to what was there, and rounds once; its element does not
depend on others, nor on which factor is which. A mutant adds up more or fewer at once, by the shape
of the tile, as a card may whose instructions do not round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

K = 16
Width = Callable[[int, int], int]  # of a tile's rows and columns, those of the accumulator: K


def install(patch: pytest.MonkeyPatch, width: Width = lambda rows, columns: K) -> None:
    """Until the end of the test."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(factor, tl.float32) for factor in (a, b))
        left, right = a.data.astype(np.float64), b.data.astype(np.float64)
        total, step = d.data, width(*d.data.shape)
        for first in range(0, left.shape[1], step):
            added = np.zeros(total.shape)
            for k in range(first, first + step):
                if left[:, k].any() and right[k].any():
                    added += left[:, k, None] * right[k]
            total = (total + added).astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
