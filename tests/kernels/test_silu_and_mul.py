"""The gated activations of Llama's and of Gemma's MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu,
    "gelu_and_mul": partial(gelu, approximate="tanh"),
}
SIZES = [(1, 1), (3, 7), (5, 77), (1, 1536), (40, 512), (5, 1024), (0, 4)]


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype, op: str
) -> None:
    x = (torch.randn(rows, 2 * width) * 5).to(dtype)
    assert_close(getattr(column, op)(x), getattr(reference, op)(x))


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy, as interpreter
def test_extremes(kernels: KernelSet, op: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, -88.5, 88.5, torch.inf, torch.nan, -200, 200])
    out = getattr(kernels, op)(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    expected = ACTIVATIONS[op](gate)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(
    column: KernelSet, dtype: torch.dtype, op: str
) -> None:
    assert_rows_alone(column, getattr(column, op), torch.randn(20, 2 * 1009).to(dtype))
