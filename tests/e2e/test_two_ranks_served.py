"""Two ranks behind `surestep serve` answer what one answers, also after one of them died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.conftest import FLAGS, SPECULATION
from support.clients.completions import client_of, read
from support.faults.server import PACED
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=1)]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = (*FLAGS, "--speculative-config", SPECULATION, "--tensor-parallel-size", "2")
    logs = tmp_path_factory.mktemp("pair-logs")
    with serve(tiny_model, logs, *flags, variables=PACED) as running:
        yield running


def answer(
    stack: Stack, temperature: float, disturb: Callable[[], object] | None = None
) -> list[int]:
    """Token ids of one stream."""
    client = client_of(stack)
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="abcabc abc",
        max_tokens=80,
        temperature=temperature,
        seed=5,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return read(stream, disturb).ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_ranks_equal_one(stack: Stack, pair: Stack, temperature: float) -> None:
    ids = answer(pair, temperature)
    assert len(ids) == 80
    assert ids == answer(stack, temperature)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_either_rank_changes_nothing(stack: Stack, pair: Stack, rank: int) -> None:
    pair.wait_until(lambda: len(pair.scheduler()["ranks"]) == 2, "both ranks serving")
    assert answer(pair, 0.8, lambda: pair.kill_rank(rank)) == answer(stack, 0.8)
