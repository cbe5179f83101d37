"""Files of tests/data/quantised, which quantising libraries wrote, mean what those make of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoints.damaged import change_config, change_tensors
from support.checkpoints.quantize import fp8
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.checkpoint.safetensors_header import read_header
from surestep_worker.configs.quantization import read_quantization
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "data/quantised"
OUTPUTS, INPUTS, CHANGES = 64, 96, 16
# Where zero points lie, and how large groups are of which the last one is short.
SAY_ALONE = ("checkpoint_format", "packing_format", "group_size", "quant_method", "sym:")
SHARES = {  # by dimension
    "whole": (0, slice(0, OUTPUTS)),
    "rows": (0, slice(7, 53)),
    "columns": (1, slice(32, 96)),
    "inside of groups": (1, slice(40, 80)),
}


def cases() -> Iterator[tuple[Path, str]]:
    for path in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((path, name) for name in sorted(file.metadata()))


def opened(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """The quantization_config and the tensors of a case, and what the library makes of them."""
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()[name])
        names = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        stored = {key: file.get_tensor(key) for key in names}
    return config, stored, stored.pop(f"{name}.meaning")


def read(
    folder: Path, name: str, config: Any, stored: dict[str, Tensor], share: str = "whole"
) -> Tensor:
    """What a rank reads of a layer."""
    save_file(stored, folder / "model.safetensors")
    dim, keep = SHARES[share]
    shape = [OUTPUTS, INPUTS]
    shape[dim] = keep.stop - keep.start
    source = TensorSource(f"{name}.weight", (OUTPUTS, INPUTS), keep, dim)
    table = {"layer.weight": Parameter((shape[0], shape[1]), (source,), linear=True)}
    checkpoint = CheckpointWeights(
        read_header(folder / "model.safetensors"),
        table,
        quantization=read_quantization(Fields({"quantization_config": config})),
        dtype=torch.float32,
    )
    with checkpoint as weights:
        made = weights.take_linear("layer.weight")
    return made if isinstance(made, Tensor) else made.dequantize()


def each(test: Any) -> Any:
    name_of = lambda value: getattr(value, "stem", value)  # noqa: E731
    return pytest.mark.parametrize(("path", "name"), [*cases()], ids=name_of)(test)


@pytest.mark.parametrize("share", SHARES)
@each
@pytest.mark.rotates(1)
def test_a_layer_means_what_its_library_makes_of_it(
    tmp_path: Path, path: Path, name: str, share: str
) -> None:
    if share == "inside of groups" and "MXFP4" in name.upper():
        pytest.skip("blocks of MXFP4 are not cut")
    config, stored, meaning = opened(path, name)
    dim, keep = SHARES[share]
    kept = meaning[keep] if dim == 0 else meaning[:, keep]
    made = read(tmp_path, name, config, stored, share)
    if name.startswith(
        ("INT", "W4A8_AWQ")
    ):  # scales of 24 bits: a zero point times its scale is rounded
        assert torch.allclose(made, kept, rtol=0, atol=2e-8)
    else:
        assert torch.equal(made.to(kept.dtype), kept)


@pytest.mark.parametrize("form", ["parted", "weight_scale_inv", "weight_scale"])
def test_squares_of_modelopt(tmp_path: Path, form: str) -> None:
    """FP8_PB_WO, whose scales have been written in three ways, cut between rows of a square."""
    sizes, keep = (304, 384), slice(130, 301)
    matrix = fp8(torch.randn(sizes))
    scales = matrix.stored.pop("weight_scale_inv")
    name, scales = (
        ("weight_scale", scales[:, None, :, None]) if form == "parted" else (form, scales)
    )
    stored = {"m.weight": matrix.stored["weight"], f"m.{name}": scales.contiguous()}
    save_file(stored, tmp_path / "model.safetensors")
    source = TensorSource("m.weight", sizes, keep)
    table = {"m": Parameter((keep.stop - keep.start, sizes[1]), (source,), linear=True)}
    entries = read_header(tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}}
    found = read_quantization(Fields(config))
    with CheckpointWeights(entries, table, quantization=found, dtype=torch.float32) as weights:
        made = weights.take_linear("m")
    assert not isinstance(made, Tensor)
    assert torch.equal(made.dequantize(), matrix.meaning[keep])


@each
@pytest.mark.rotates(1)
def test_wrong_is_refused_or_means_the_same(tmp_path: Path, path: Path, name: str) -> None:
    """Tensors that are others, and all of the config that does not say alone what they mean."""
    config, stored, meaning = opened(path, name)
    rng, refused = random.Random(name), 0
    for _ in range(CHANGES):
        other, changed = json.loads(json.dumps(config)), dict(stored)
        what = (
            change_config(other, rng)
            if rng.random() < 0.5
            else change_tensors(changed, rng, f"{name}.")
        )
        if what.startswith(SAY_ALONE):
            continue
        try:
            found = read(tmp_path, name, other, changed)
        except InvalidRequest:
            refused += 1
        else:
            assert (found - meaning).abs().max() < 0.02 * meaning.float().std(), what  # rounding
    assert refused


def test_every_library_wrote_some() -> None:
    assert {path.stem for path, _ in cases()} == {"auto_round", "gptqmodel", "modelopt"}
