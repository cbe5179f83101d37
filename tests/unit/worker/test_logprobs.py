"""Log-probabilities of the raw distribution, their ranks and alternatives."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_reference import params
from surestep_proto import engine_pb2 as pb
from surestep_worker.sampling import SamplingSlots, Verdict, emitted_logprobs, token_logprobs

V = 300


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
        assert got.logprob[m].item() == pytest.approx(logprob, abs=1e-5)
        assert got.rank[m] == rank
        assert got.top_token_ids[start : start + len(top)].tolist() == top
        want = [_by_hand(logits[m].tolist(), i, 0)[0] for i in top]
        assert got.top_logprobs[start : start + len(top)].tolist() == pytest.approx(want, abs=1e-5)
        start += len(top)
    assert got.top_token_ids.numel() == start


def test_more_alternatives_than_ids() -> None:
    got = token_logprobs(
        torch.randn(2, 3), torch.tensor([0, 1]), torch.arange(2), torch.tensor([9, 1])
    )
    assert got.num_top.tolist() == [3, 1]
    assert got.top_token_ids.numel() == 4


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
    for name in together._fields:
        parts = torch.cat([getattr(one, name) for one in alone])
        assert torch.equal(getattr(together, name), parts), name


def test_only_emitted_tokens_of_rows_that_want_them() -> None:
    """Windows of 3, 1, 2 and 1 rows; the second wants nothing, the last emits nothing."""
    slots = SamplingSlots(5, V)
    for tenant, p in {
        4: params(want_logprobs=True, num_top_logprobs=2),
        1: params(),
        0: params(want_logprobs=True),
        3: params(want_logprobs=True, num_top_logprobs=5),
    }.items():
        slots.admit(tenant, p, 1)
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(8))
    verdict = Verdict(
        tokens=torch.tensor([[11, 12, 13], [21, 0, 0], [31, 32, 0], [41, 0, 0]]),
        n_accepted=torch.tensor([1, 0, 1, 0]),
        n_emitted=torch.tensor([2, 1, 2, 0]),
        status=torch.tensor([pb.OK, pb.OK, pb.OK, pb.NON_FINITE], dtype=torch.uint8),
    )
    cu_rows, row = torch.tensor([0, 3, 4, 6, 7]), torch.tensor([0, 2, 5, 6])
    slot = torch.tensor([4, 1, 0, 3])
    got = emitted_logprobs(logits, cu_rows, verdict, row, slot, slots.logprobs)
    assert got is not None
    columns = got.to_proto()
    assert list(columns.row) == [0, 0, 5, 5]
    assert list(columns.token_id) == [11, 12, 31, 32]
    assert list(columns.num_top) == [2, 2, 0, 0]
    want = logits.log_softmax(1)[torch.tensor([0, 1, 4, 5]), torch.tensor([11, 12, 31, 32])]
    assert list(columns.logprob) == pytest.approx(want.tolist(), abs=1e-6)
    assert len(columns.top_token_ids) == len(columns.top_logprobs) == 4


def test_nobody_wants_any() -> None:
    slots = SamplingSlots(1, V)
    slots.admit(0, params(), 1)
    verdict = Verdict(*(torch.ones(1, dtype=torch.int64) for _ in range(4)))._replace(
        tokens=torch.ones(1, 1, dtype=torch.int64)
    )
    arguments = (torch.tensor([0, 1]), verdict, torch.zeros(1).long(), torch.zeros(1).long())
    assert emitted_logprobs(torch.randn(1, V), *arguments, slots.logprobs) is None
