"""Log-probabilities of the raw distribution, their ranks and alternatives."""

from __future__ import annotations

import math

import pytest
import torch
from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_worker.step.logprobs import columns, score

V = 300


def token_logprobs(
    logits: torch.Tensor, token_id: torch.Tensor, row: torch.Tensor, num_top: torch.Tensor
) -> LogprobColumns:
    """As a step makes them: with as many alternatives as the most of them want."""
    width = min(int(num_top.max()), logits.shape[1])
    scores = score(logits, token_id, width)
    return columns(row.numpy(), token_id.numpy(), num_top.numpy(), scores)


def _by_hand(logits: list[float], token_id: int, num_top: int) -> tuple[float, int, list[int]]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    total = math.log(math.fsum(math.exp(x) for x in logits))
    return logits[token_id] - total, order.index(token_id) + 1, order[:num_top]


@pytest.mark.parametrize("tied", [False, True])
def test_values_ranks_and_alternatives(tied: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, V, generator=generator) * 4
    logits = logits.round() if tied else logits
    token_id = torch.randint(0, V, (40,), generator=generator)
    num_top = torch.arange(40) % 7
    got = token_logprobs(logits, token_id, torch.arange(40), num_top)
    start = 0
    for m in range(40):
        logprob, rank, top = _by_hand(logits[m].tolist(), int(token_id[m]), int(num_top[m]))
        assert got.logprob[m] == pytest.approx(logprob, abs=1e-5)
        assert got.rank[m] == rank
        assert got.top_token_ids[start : start + len(top)] == top
        want = [_by_hand(logits[m].tolist(), i, 0)[0] for i in top]
        assert got.top_logprobs[start : start + len(top)] == pytest.approx(want, abs=1e-5)
        start += len(top)
    assert len(got.top_token_ids) == start


def test_more_alternatives_than_ids() -> None:
    got = token_logprobs(
        torch.randn(2, 3), torch.tensor([0, 1]), torch.arange(2), torch.tensor([9, 1])
    )
    assert got.num_top == [3, 1]
    assert len(got.top_token_ids) == 4


def test_chunks_do_not_show() -> None:
    logits = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(6))
    token_id, num_top = torch.arange(20) * 2000, torch.arange(20) % 3
    together = token_logprobs(logits, token_id, torch.arange(20), num_top)
    alone = [
        token_logprobs(
            logits[m : m + 1], token_id[m : m + 1], torch.tensor([m]), num_top[m : m + 1]
        )
        for m in range(20)
    ]
    for name in LogprobColumns.DESCRIPTOR.fields_by_name:
        parts = [value for one in alone for value in getattr(one, name)]
        assert getattr(together, name) == parts, name
