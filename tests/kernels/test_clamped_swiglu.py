from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.clamped_swiglu.triton import clamped_swiglu
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

LIMIT = 7.0
SHAPES = [(1, 1), (5, 77), (1, 1536), (40, 512)]


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
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_equals_the_reference(
    native: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * width) * 5).to(dtype)
    assert_close(native.clamped_swiglu(x, LIMIT), reference.clamped_swiglu(x, LIMIT))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 7), (5, 1024), (2, 1500), (0, 4)])
def test_triton_equals_the_reference(
    gpu: str, reference: KernelSet, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * inner) * 5).to(dtype)
    out = clamped_swiglu(x.to(gpu), LIMIT).cpu()
    if rows:
        assert_close(out, reference.clamped_swiglu(x, LIMIT))
    assert out.shape == (rows, inner)


EXTREMES = [0.0, -0.0, 7.0, 7.5, 1e4, -1e4, -50.0, torch.inf, torch.nan]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy, as interpreter
def test_extremes(native: KernelSet, reference: KernelSet, gpu: str) -> None:
    """Of gates, then of ups: what is no number stays none."""
    every, ones = torch.tensor(EXTREMES), torch.ones(len(EXTREMES))
    for x in (torch.cat((every, ones))[None], torch.cat((ones, every))[None]):
        expected = reference.clamped_swiglu(x, LIMIT)
        assert expected.isnan().sum() == 1
        for out in (native.clamped_swiglu(x, LIMIT), clamped_swiglu(x.to(gpu), LIMIT).cpu()):
            torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(native: KernelSet, dtype: torch.dtype) -> None:
    x = (torch.randn(200, 2 * 101) * 4).to(dtype)
    native.set_num_threads(2)
    together = native.clamped_swiglu(x, LIMIT)
    native.set_num_threads(1)
    alone = torch.cat([native.clamped_swiglu(row, LIMIT) for row in x.split(1)])
    assert torch.equal(together, alone)
