from __future__ import annotations

import pytest
import torch
from support.kernels.cases import assert_rows_alone
from surestep_kernels import KernelSet
from torch import Tensor

CAP = 30.0
# Around the border between the two branches of tanh, too.
EVERY = torch.cat((torch.linspace(-200, 200, 4001), torch.linspace(-19, 19, 997)))
SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])


def capped(kernels: KernelSet, x: Tensor, cap: float = CAP) -> Tensor:
    x = x.clone()
    kernels.soft_cap(x, cap)
    return x


@pytest.mark.parametrize("cap", [0.5, CAP])
@pytest.mark.parametrize("column", ["c", "reference"], indirect=True)
def test_is_tanh_to_the_last_bits(column: KernelSet, cap: float) -> None:
    exact = cap * torch.tanh(EVERY.double() / cap)
    torch.testing.assert_close(
        capped(column, EVERY[None], cap)[0].double(), exact, rtol=4e-7, atol=1e-12
    )
    special = capped(column, SPECIAL[None], cap)[0]
    expected = torch.tensor([0.0, -0.0, 1e-30, -1e-30, cap, -cap, cap, -cap, torch.nan])
    torch.testing.assert_close(special, expected, equal_nan=True, rtol=4e-7, atol=0)
    assert torch.equal(special.signbit()[:-1], expected.signbit()[:-1])


@pytest.mark.parametrize("rows", [1, 40, 0])
def test_a_row_does_not_depend_on_its_place(native: KernelSet, rows: int) -> None:
    """Rows of a width that no vector divides: the same numbers lie at all places of vectors."""
    row = EVERY[:1009] / 7
    together = capped(native, row.repeat(rows, 1))
    assert torch.equal(together, capped(native, row[None]).expand(rows, -1))
    assert_rows_alone(native, lambda x: capped(native, x), torch.randn(20, 1009) * 40)
