"""Checkpoints as compressed-tensors writes them mean what it reads from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.compressed import PRESETS, compress, compressed_twins, scheme
from support.checkpoints.tiny import make_tiny_checkpoint
from support.ranks.tensor_parallel import run_steps
from surestep_worker.checkpoint.formats import Format, ModelOptFp8, Share
from surestep_worker.checkpoint.formats.format import EVERYTHING
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor

ROWS, COLUMNS = 304, 384


def format_of(preset: str, group_size: int | None) -> Format:
    """From the config that names it."""
    weights = scheme(preset, group_size).model_dump(mode="json", exclude_none=True)
    config = {
        "quant_method": "compressed-tensors",
        "format": PRESETS[preset],
        "config_groups": {"group_0": weights},
    }
    found = read_quantization(Fields({"quantization_config": config}))
    assert isinstance(found, Format)
    return found


TYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int8: "I8",
}


class Stored:
    """The tensors of a module "m"."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {f"m.{name}": tensor for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        return TYPES.get(self.tensors[name].dtype, "BF16")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        tensor = self.tensors[name]
        return (tensor if tensor.dim() > 1 else tensor.reshape(-1, 1))[rows, columns]


def test_nvfp4_of_modelopt_is_that_of_others() -> None:
    """Its scale of all multiplies, and names differ; in one checkpoint with FP8."""
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    parts, meaning = compress(weight, scheme("NVFP4"), PRESETS["NVFP4"])
    whole = parts.pop("weight_global_scale")
    stored = Stored(
        {
            "weight": parts["weight_packed"],
            "weight_scale": parts["weight_scale"],
            "weight_scale_2": (1 / whole)[0],
        }
    )
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    found = read_quantization(Fields({"quantization_config": config}))
    assert found is not None
    held = found.format_of("m", stored)
    assert held is not None
    assert all(of.fits(stored.shape(n)) for n, of in held.stored("m", ROWS, COLUMNS).items())
    read = held.read(Share("m", range(ROWS), range(COLUMNS), COLUMNS), stored.read)
    assert not isinstance(read, Tensor)
    assert torch.allclose(read.dequantize().bfloat16(), meaning, rtol=1e-2, atol=0)
    codes, _ = compress(weight, scheme("FP8"), PRESETS["FP8"])
    assert found.format_of("m", Stored(codes)) == ModelOptFp8((), (EVERYTHING, EVERYTHING))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rows", [range(ROWS), range(7, 135)])
@pytest.mark.parametrize("columns", [range(COLUMNS), range(128, 384), range(32, 192)])
def test_a_share_is_that_part_of_the_weight(preset: str, rows: range, columns: range) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()
    parts, meaning = compress(weight, scheme(preset, 32), PRESETS[preset])
    stored = Stored(parts)
    found = format_of(preset, 32).format_of("m", stored)
    assert found is not None
    for name, of in found.stored("m", ROWS, COLUMNS).items():
        assert of.fits(stored.shape(name)), name
    read = found.read(Share("m", rows, columns, COLUMNS), stored.read)
    made = read if isinstance(read, Tensor) else read.dequantize()
    expected = meaning[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(made.to(expected.dtype), expected)


def assert_near(packed: Tensor, meant: Tensor) -> None:
    """Of products with its weights, which it rounds to bfloat16, and with ours, which are not."""
    assert (packed - meant).abs().max() < 0.05 * meant.std()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.rotates(2)
def test_logits_are_those_of_what_the_library_reads(tmp_path: Path, preset: str) -> None:
    source = make_tiny_checkpoint(tmp_path / "m", "qwen3", hidden=128, intermediate=256)
    twins = compressed_twins(source, {"": (scheme(preset, 32), PRESETS[preset])})
    assert_near(*(run_steps(path, TensorParallel())["logits"] for path in twins))


def test_several_formats_in_one_checkpoint(tmp_path: Path) -> None:
    """Also in projections that are merged, which become plain then."""
    source = make_tiny_checkpoint(tmp_path / "m", "qwen3", hidden=128, intermediate=256)
    mixed = {"down_proj": "NVFP4", "q_proj": "W8A16", "k_proj": "FP8_DYNAMIC", "": "W4A16"}
    twins = compressed_twins(
        source, {end: (scheme(name, 32), PRESETS[name]) for end, name in mixed.items()}
    )
    assert_near(*(run_steps(path, TensorParallel())["logits"] for path in twins))
