from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet
from surestep_kernels.add_adapters import AdapterWeights
from torch import Tensor

PLACES, MOST = 5, 12
# Inputs, and the spans of outputs: first, end, part.
SHAPES = {
    "one": (40, [(0, 72, 0)]),
    "merged": (72, [(0, 40, 0), (40, 64, 1), (64, 90, 2)]),
    "interleaved": (33, [(0, 8, 0), (8, 16, 1), (16, 24, 0), (30, 35, 1)]),
    "wide": (1048, [(0, 1030, 0)]),
}


def weights_of(
    inputs: int, spans: list[tuple[int, int, int]], dtype: torch.dtype
) -> AdapterWeights:
    """Ranks of all kinds, none included; what no rank counts is NaN."""
    parts = 1 + max(part for _, _, part in spans)
    a = torch.randn(PLACES, parts, MOST, inputs) / inputs**0.5
    b = torch.randn(PLACES, MOST, spans[-1][1])
    ranks = torch.randint(0, MOST + 1, (PLACES, parts), dtype=torch.int32)
    ranks[0], ranks[1, 0] = MOST, 0
    for place, part in torch.cartesian_prod(torch.arange(PLACES), torch.arange(parts)).tolist():
        a[place, part, ranks[place, part] :] = torch.nan
    for place, (first, end, part) in ((p, span) for p in range(PLACES) for span in spans):
        b[place, ranks[place, part] :, first:end] = torch.nan
    scales = torch.rand(PLACES, parts) * 4
    return AdapterWeights(a.to(dtype), b.to(dtype), ranks, scales, torch.tensor(spans))


def added(kernels: KernelSet, y: Tensor, x: Tensor, places: Tensor, w: AdapterWeights) -> Tensor:
    y = y.clone()
    kernels.add_adapters(y, x, places, w)
    return y


@pytest.mark.parametrize("wide", [False, True], ids=["", "to float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, rows: int, shape: str, dtype: torch.dtype, wide: bool
) -> None:
    inputs, spans = SHAPES[shape]
    w = weights_of(inputs, spans, dtype)
    x = torch.randn(rows, inputs).to(dtype)
    y = torch.randn(rows, spans[-1][1]).to(torch.float32 if wide else dtype)
    places = torch.randint(-1, PLACES, (rows,), dtype=torch.int32)
    out = added(column, y, x, places, w)
    assert_close(out, added(reference, y, x, places, w))
    assert torch.equal(out[places < 0], y[places < 0])
    assert rows < 2 or not torch.equal(out, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others(
    column: KernelSet, shape: str, dtype: torch.dtype
) -> None:
    inputs, spans = SHAPES[shape]
    w = weights_of(inputs, spans, dtype)
    x, y = torch.randn(20, inputs).to(dtype), torch.randn(20, spans[-1][1]).to(dtype)
    places = torch.randint(-1, PLACES, (20,), dtype=torch.int32)
    places[4:13] = 0  # rows that share what is read of an adapter
    assert_rows_alone(column, lambda y, x, at: added(column, y, x, at, w), y, x, places)


def test_the_reference_is_what_peft_computes(reference: KernelSet) -> None:
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(torch.nn.Linear(40, 72, bias=False))
    config = LoraConfig(r=5, lora_alpha=8, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(base, config).eval()
    layer = model.base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    w = AdapterWeights(
        a.detach()[None, None],
        b.detach().T[None],
        torch.tensor([[5]], dtype=torch.int32),
        torch.tensor([[8 / 5]]),
        torch.tensor([(0, 72, 0)]),
    )
    x = torch.randn(6, 40)
    y = torch.nn.functional.linear(x, layer.base_layer.weight.detach())
    assert_close(added(reference, y, x, torch.zeros(6, dtype=torch.int32), w), model(x).detach())
