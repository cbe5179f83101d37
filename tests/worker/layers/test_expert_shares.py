"""How experts are shared out among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.checkpoints.gpt_oss_moe import EXPERTS, moe_config
from surestep_common.errors import InvalidRequest
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.moe import gpt_oss_moe_table

PLAIN = "at.experts.gate_up_proj", "at.experts.down_proj"
PACKED = tuple(f"{name}_{part}" for name in PLAIN for part in ("blocks", "scales"))


def shares(ranks: int, *, mxfp4: bool, inner: int) -> list[int]:
    """Columns of an expert on each rank."""
    found, config = [], moe_config(mxfp4=mxfp4, inner=inner)
    for rank in range(ranks):
        shard = Sharding(TensorParallel(rank, ranks, cast(Any, object())))
        table = gpt_oss_moe_table("", "at.", config, shard, {*(PACKED if mxfp4 else PLAIN)})
        gate_up, down = table["0.gate_up.weight"], table["0.down.weight"]
        kept = down.shape[1 if mxfp4 else 0]
        assert gate_up.shape[0 if mxfp4 else 1] == 2 * kept
        assert table["0.gate_up.bias"].shape == (2 * kept,)
        found.append(kept)
    return found


@pytest.mark.parametrize(
    ("ranks", "mxfp4", "expected"),
    [
        (8, True, [352, 352, 352, 384, 352, 352, 352, 384]),  # 90 blocks
        (4, True, [704, 736, 704, 736]),
        (8, False, [360] * 8),
    ],
)
def test_ranks_keep_whole_blocks(ranks: int, mxfp4: bool, expected: list[int]) -> None:
    found = shares(ranks, mxfp4=mxfp4, inner=2880)
    assert found == expected
    assert sum(found) == 2880


@pytest.mark.parametrize(
    ("ranks", "expert_parallel", "message"),
    [
        (8, False, "tensor_parallel_size 8 does not divide an expert of 3 blocks of columns"),
        (4, True, f"tensor_parallel_size 4 does not divide {EXPERTS} experts"),
        (3, True, "tensor_parallel_size 3 does not divide 8 heads"),
    ],
)
def test_more_ranks_than_blocks_are_refused(
    ranks: int, expert_parallel: bool, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        moe_config(mxfp4=True).check_ranks(ranks, expert_parallel=expert_parallel)


def test_what_divides_is_served() -> None:
    config = moe_config(mxfp4=True)
    config.check_ranks(2)
    config.check_ranks(2, expert_parallel=True)
    replace(config, quantization=None).check_ranks(8)  # whose columns need no blocks
