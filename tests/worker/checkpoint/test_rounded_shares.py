"""What ranks read of weights that are rounded while they are loaded: parts of what one rank has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import INT4, INT8, ROUNDINGS, Rounding
from surestep_worker.checkpoint.model_folder import read_entries
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.configs.wanted_quantization import check_held, rounding_wanted

NAME, SHAPE = "layer.weight", (40, 456)
CUTS = [(0, 456), (0, 228), (0, 48), (48, 96), (128, 456), (224, 448), (448, 456)]


def write(folder: Path, weight: torch.Tensor) -> Path:
    save_file({NAME: weight.contiguous()}, folder / "model.safetensors")
    return folder


def open_weights(folder: Path, parameter: Parameter, rounding: Rounding) -> CheckpointWeights:
    table = {"taken": parameter}
    return CheckpointWeights(read_entries(folder), table, dtype=torch.float32, rounding=rounding)


def take(folder: Path, parameter: Parameter, rounding: Rounding) -> torch.Tensor | QuantizedWeight:
    with open_weights(folder, parameter, rounding) as weights:
        return weights.take_linear("taken")


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("input_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_has_the_numbers_that_one_rank_has(
    tmp_path: Path, name: str, input_major: bool, dtype: torch.dtype
) -> None:
    """To the last bit, wherever its inputs begin and end, also within groups."""
    rounding, weight = ROUNDINGS[name], torch.randn(SHAPE).to(dtype)
    folder, shape = write(tmp_path, weight.T if input_major else weight), SHAPE
    if input_major:
        shape = shape[::-1]
    whole = rounding(weight).dequantize()
    for dim, cuts in ((0, [(0, 40), (13, 27)]), (1, CUTS)):
        for first, end in cuts:
            at = 1 - dim if input_major else dim
            kept = slice(first, end)
            source = TensorSource(NAME, shape, kept, at, input_major=input_major)
            sizes = [*shape]
            sizes[at] = end - first
            made = take(folder, Parameter((sizes[0], sizes[1]), (source,), linear=True), rounding)
            assert isinstance(made, QuantizedWeight)
            assert torch.equal(made.dequantize(), whole[kept] if dim == 0 else whole[:, kept])


def source(first: int = 0, end: int = SHAPE[1]) -> TensorSource:
    return TensorSource(NAME, SHAPE, slice(first, end), dim=1)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_part_that_cuts_groups_where_they_cannot_be_cut_is_refused(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, torch.randn(SHAPE))
    parameter = Parameter((SHAPE[0], 228), (source(228, 456),), linear=True)
    weights = open_weights(tmp_path, parameter, ROUNDINGS[name])
    message = "layer: inputs 228 to 456 of 456 cut groups of"
    with pytest.raises(InvalidRequest, match=message) as raised, weights:
        weights.take_linear("taken")
    assert raised.value.param == "tensor_parallel_size"


@pytest.mark.parametrize("name", ROUNDINGS)
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, name: str) -> None:
    weight = torch.randn(SHAPE)
    weight[7, 9] = torch.nan
    write(tmp_path, weight)
    weights = open_weights(tmp_path, Parameter(SHAPE, (source(),), linear=True), ROUNDINGS[name])
    message = "layer cannot be rounded: some elements are NaN, infinite or too large"
    with pytest.raises(InvalidRequest, match=message), weights:
        weights.take_linear("taken")


def test_routers_and_tables_stay_as_they_are(tmp_path: Path) -> None:
    weight = torch.randn(SHAPE)
    write(tmp_path, weight)
    exact = Parameter(SHAPE, (source(),), linear=True, least_bits=32)
    vector = Parameter(SHAPE, (source(),))
    for parameter in (exact, vector):
        assert torch.equal(take(tmp_path, parameter, INT4), weight)  # type: ignore[arg-type]
    table = Parameter(SHAPE, (source(),), table=True, least_bits=8)
    with open_weights(tmp_path, table, INT4) as weights:
        head = weights.quantized("taken")
        assert head is not None
        assert torch.equal(head.dequantize(), INT8(weight).dequantize())
        assert torch.equal(weights.take("taken"), weight)


def test_what_is_wanted_of_a_checkpoint() -> None:
    for name in (None, *ROUNDINGS):
        assert rounding_wanted(name, None, "cpu") == name
    assert rounding_wanted("fp8", None, "cuda") == "fp8"
    for wanted, held in [("fp8", "fp8"), ("awq_marlin", "awq"), ("gguf", "gguf"), (None, "awq")]:
        assert rounding_wanted(wanted, held, "cuda") is None
    check_held("gptq_marlin", "gptq")


@pytest.mark.parametrize(
    ("wanted", "held", "device", "message"),
    [
        (
            "int8",
            None,
            "cuda",
            "not quantised, and on cuda it can be rounded while it is loaded to fp8",
        ),
        (
            "awq",
            None,
            "cpu",
            "not quantised, and on cpu it can be rounded while it is loaded to int8, int4, fp8",
        ),
        ("bitsandbytes", None, "cpu", "not quantised, and on cpu it can be rounded"),
        ("int8", "awq", "cpu", "quantised by 'awq', and it is served as it is stored"),
        ("fp8", "gguf", "cpu", "quantised by 'gguf', and it is served as it is stored"),
        ("awq", "gptq", "cuda", "quantised by 'gptq', and it is served as it is stored"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    wanted: str, held: str | None, device: str, message: str
) -> None:
    begin = f"--quantization {wanted}: the checkpoint is "
    with pytest.raises(InvalidRequest, match=re.escape(begin + message)) as raised:
        rounding_wanted(wanted, held, device)
    assert raised.value.param == "quantization"
    assert "\n" not in raised.value.message
