"""A layer of gpt-oss's experts beside that of transformers, whole and shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.gpt_oss_moe import EXPERTS, TOP_K, WIDTH, make_moe, moe_config
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.checkpoint.parameters import CheckpointWeights
from surestep_worker.checkpoint.prepared import prepared
from surestep_worker.checkpoint.safetensors_header import read_header
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.moe import GptOssMoe, gpt_oss_moe_table
from torch import Tensor

FILE = "model.safetensors"
NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")


def run(
    folder: Path,
    x: Tensor,
    *,
    mxfp4: bool,
    kernels: KernelSet = NATIVE,
    ranks: int = 1,
    expert_parallel: bool = False,
) -> Tensor:
    """The sum over ranks of what each makes of x [T, H]."""
    total = torch.zeros_like(x)
    for rank in range(ranks):
        group = cast(Any, object()) if ranks > 1 else None
        shard = Sharding(TensorParallel(rank, ranks, group), expert_parallel)
        layer = load(folder, shard, kernels, mxfp4=mxfp4)
        total += kernels.mix_experts(*layer(x))
    return total


def load(folder: Path, shard: Sharding, kernels: KernelSet, *, mxfp4: bool) -> GptOssMoe:
    """One rank's layer."""
    config, entries = moe_config(mxfp4=mxfp4), read_header(folder / FILE)

    def open_checkpoint() -> CheckpointWeights:
        table = gpt_oss_moe_table("0.mlp.", "mlp.", config, shard, entries.keys())
        return CheckpointWeights(
            entries, table, quantization=config.quantization, dtype=torch.float32
        )

    with prepared(WeightStore.private(), {}, kernels, "cpu", open_checkpoint) as weights:
        return GptOssMoe("0.mlp.", LayerContext(config, weights, shard, kernels, torch.empty(0)))


@pytest.fixture(params=[False, True], ids=["plain", "mxfp4"])
def mxfp4(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def made(tmp_path: Path, mxfp4: bool) -> tuple[Path, Tensor, Tensor]:
    """A checkpoint, inputs, and what transformers makes of them."""
    torch.manual_seed(5)
    layer, x = make_moe(tmp_path, mxfp4=mxfp4), torch.randn(17, WIDTH)
    with torch.no_grad():
        expected, _ = layer(x[None])
    return tmp_path, x, expected[0]


@pytest.mark.parametrize("kernels", [NATIVE, REFERENCE], ids=lambda kernels: kernels.name)
def test_equals_transformers(
    made: tuple[Path, Tensor, Tensor], mxfp4: bool, kernels: KernelSet
) -> None:
    folder, x, expected = made
    out = run(folder, x, mxfp4=mxfp4, kernels=kernels)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "expert_parallel"), [(2, False), (3, False), (2, True), (EXPERTS, True)]
)
def test_ranks_sum_to_the_whole(
    made: tuple[Path, Tensor, Tensor], mxfp4: bool, ranks: int, expert_parallel: bool
) -> None:
    """Three blocks of columns for two ranks, too: one of them has two."""
    folder, x, expected = made
    out = run(folder, x, mxfp4=mxfp4, ranks=ranks, expert_parallel=expert_parallel)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_token_is_the_same_alone_and_in_company(
    made: tuple[Path, Tensor, Tensor], mxfp4: bool
) -> None:
    folder, x, _ = made
    together = run(folder, x, mxfp4=mxfp4)
    for rows in ([0], [16, 3], [5, 6, 7, 8, 9, 10, 11]):
        assert torch.equal(run(folder, x[rows], mxfp4=mxfp4), together[rows])


def swap_nibbles(stored: dict[str, Tensor]) -> None:
    blocks = stored["mlp.experts.gate_up_proj_blocks"]
    stored["mlp.experts.gate_up_proj_blocks"] = blocks >> 4 | blocks << 4


def raise_scales(stored: dict[str, Tensor]) -> None:
    stored["mlp.experts.down_proj_scales"] += 1


def swap_gates(stored: dict[str, Tensor]) -> None:
    for name in ("blocks", "scales", "bias"):
        whole = stored[f"mlp.experts.gate_up_proj_{name}"]
        swapped = whole.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
        stored[f"mlp.experts.gate_up_proj_{name}"] = swapped.contiguous()


def halve_gates(stored: dict[str, Tensor]) -> None:
    """Gates first, then ups."""
    for name in ("blocks", "scales", "bias"):
        whole = stored[f"mlp.experts.gate_up_proj_{name}"]
        parted = whole.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        stored[f"mlp.experts.gate_up_proj_{name}"] = parted.contiguous()


@pytest.mark.parametrize("mxfp4", [True], indirect=True, ids=["mxfp4"])
@pytest.mark.parametrize("change", [swap_nibbles, raise_scales, swap_gates, halve_gates])
def test_another_reading_of_the_tensors_is_seen(
    made: tuple[Path, Tensor, Tensor], change: Callable[[dict[str, Tensor]], None]
) -> None:
    folder, x, expected = made
    stored = load_file(folder / FILE)
    change(stored)
    save_file(stored, folder / FILE)
    error = (run(folder, x, mxfp4=True) - expected).abs().max()
    assert error > 0.1 * expected.abs().mean()


def test_the_bias_of_the_router_chooses(made: tuple[Path, Tensor, Tensor], mxfp4: bool) -> None:
    """The last experts, and what others would make is never looked at."""
    folder, x, _ = made
    stored = load_file(folder / FILE)
    stored["mlp.router.bias"] = torch.arange(EXPERTS) * 1000.0
    for not_finite, seen in ((slice(0, EXPERTS - TOP_K), False), (slice(EXPERTS - 1, None), True)):
        stored["mlp.experts.down_proj_bias"][not_finite] = torch.nan
        save_file(stored, folder / FILE)
        assert run(folder, x, mxfp4=mxfp4).isnan().all() == seen
        assert run(folder, x, mxfp4=mxfp4).isfinite().all() != seen


@pytest.mark.parametrize("mxfp4", [True], indirect=True, ids=["mxfp4"])
def test_a_scale_that_is_no_number_is_refused(made: tuple[Path, Tensor, Tensor]) -> None:
    folder, x, _ = made
    stored = load_file(folder / FILE)
    stored["mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(stored, folder / FILE)
    with pytest.raises(InvalidRequest, match=r"mlp\.experts\.down_proj_scales holds NaN"):
        run(folder, x, mxfp4=True)


@pytest.mark.parametrize("mxfp4", [True], indirect=True, ids=["mxfp4"])
def test_scales_without_blocks_are_missed_by_name(made: tuple[Path, Tensor, Tensor]) -> None:
    folder, x, _ = made
    stored = load_file(folder / FILE)
    del stored["mlp.experts.gate_up_proj_blocks"]
    save_file(stored, folder / FILE)
    with pytest.raises(InvalidRequest, match=r"missing: mlp\.experts\.gate_up_proj_blocks"):
        run(folder, x, mxfp4=True)
