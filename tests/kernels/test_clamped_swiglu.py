from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

LIMIT = 7.0
SIZES = [(1, 1), (3, 7), (5, 77), (1, 1536), (40, 512), (5, 1024), (0, 4)]


def transformers_gates(x: Tensor, limit: float) -> Tensor:
    """Of gates that come first, which alternate with ups there."""
    config = GptOssConfig(
        hidden_size=8, intermediate_size=8, num_local_experts=1, swiglu_limit=limit
    )
    pairs = torch.stack(x.chunk(2, dim=1), dim=2).flatten(1)
    gated: Tensor = GptOssExperts(config)._apply_gate(pairs)
    return gated


@pytest.mark.parametrize("limit", [LIMIT, 0.5])
def test_the_reference_is_what_transformers_computes(reference: KernelSet, limit: float) -> None:
    x = torch.randn(40, 2 * 30) * 5
    assert (x.abs() > limit).any()
    assert_close(reference.clamped_swiglu(x, limit), transformers_gates(x, limit))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * width) * 5).to(dtype)
    assert_close(column.clamped_swiglu(x, LIMIT), reference.clamped_swiglu(x, LIMIT))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy, as interpreter
def test_extremes(column: KernelSet, reference: KernelSet) -> None:
    """Of gates, then of ups: what is no number stays none."""
    every = torch.tensor([0.0, -0.0, 7.0, 7.5, 1e4, -1e4, -50.0, torch.inf, torch.nan])
    ones = torch.ones(len(every))
    for x in (torch.cat((every, ones))[None], torch.cat((ones, every))[None]):
        expected = reference.clamped_swiglu(x, LIMIT)
        assert expected.isnan().sum() == 1
        out = column.clamped_swiglu(x, LIMIT)
        torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(column: KernelSet, dtype: torch.dtype) -> None:
    x = (torch.randn(20, 2 * 1009) * 4).to(dtype)
    assert_rows_alone(column, lambda rows: column.clamped_swiglu(rows, LIMIT), x)
