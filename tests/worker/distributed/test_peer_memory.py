"""Who adds the values of the ranks up, and which GPUs can do it in each other's memory."""

from __future__ import annotations

import pytest
import torch
from surestep_worker.distributed.peer_memory import RankLocation, can_reach_all, in_one_shot
from surestep_worker.distributed.tensor_parallel import SumMethod, sum_method

HERE = ("mnt:[1]", "pid:[2]")
VISIBLE = ["GPU-a", "GPU-b", "GPU-c"]
PLACES = [RankLocation(*HERE, gpu) for gpu in VISIBLE]


@pytest.mark.parametrize(
    ("dtype", "size", "peers", "expected"),
    [
        (torch.bfloat16, 2, True, SumMethod.PEERS),
        (torch.float32, 8, True, SumMethod.PEERS),
        (torch.float32, 2, False, SumMethod.BACKEND),  # two values have one sum
        (torch.float32, 3, False, SumMethod.GATHER),
        (torch.bfloat16, 8, False, SumMethod.GATHER),
        (torch.float16, 4, True, SumMethod.GATHER),  # which torch's kernels do not add
        (torch.float16, 2, True, SumMethod.BACKEND),
        (torch.int64, 8, True, SumMethod.BACKEND),  # exact in any order
    ],
)
def test_who_adds_up(dtype: torch.dtype, size: int, peers: bool, expected: SumMethod) -> None:
    assert sum_method(dtype, size, peers=peers) is expected


def test_a_decode_step_goes_in_one_shot_and_a_prompt_does_not() -> None:
    hidden_bytes = 4096 * 2
    assert in_one_shot(hidden_bytes)
    assert in_one_shot(8 * 4 * hidden_bytes)
    assert not in_one_shot(2048 * hidden_bytes)


def reach(
    places: list[RankLocation], pairs: tuple[tuple[int, int], ...] = ((1, 0), (1, 2)), mine: int = 1
) -> bool:
    return can_reach_all(PLACES[mine], places, VISIBLE, lambda own, other: (own, other) in pairs)


def test_gpus_in_reach() -> None:
    assert reach(PLACES)
    assert not reach(PLACES, pairs=((1, 0), (2, 1)))
    assert not reach(PLACES, mine=0)


@pytest.mark.parametrize(
    "stranger",
    [
        RankLocation(*HERE, "GPU-d"),  # of another machine, or hidden from this process
        RankLocation("mnt:[9]", HERE[1], "GPU-c"),  # in a container of its own
        RankLocation(HERE[0], "pid:[9]", "GPU-c"),
    ],
)
def test_gpus_out_of_reach(stranger: RankLocation) -> None:
    assert not reach([*PLACES[:2], stranger])
