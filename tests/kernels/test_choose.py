from __future__ import annotations

import pytest
import torch
from support.kernels.cases import interpreted_in_turn
from support.kernels.draw_params import OFF, make_params
from support.kernels.slots import randint
from surestep_kernels import KernelSet
from surestep_kernels.choose import RowStatus, choose_reference, gumbel_noise

RULES = [
    OFF,
    {**OFF, "min_p": 0.1},
    {**OFF, "top_k": 1},
    {**OFF, "top_k": 7},
    {**OFF, "top_p": 0.6},
    {**OFF, "top_p": 0.999},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.3, "top_k": 1000, "top_p": 0.05},
]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize(
    ("vocab", "parts", "ties"), [(5, 64, True), (300, 64, True), (300, 2, True), (2049, 1, False)]
)
@interpreted_in_turn
def test_chooses_what_the_reference_chooses(
    column: KernelSet,
    vocab: int,
    parts: int,
    ties: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surestep_kernels.choose.vocab.MAX_PARTS", parts)
    cases = [(0.0, RULES[3]), *((temperature, rule) for rule in RULES)]
    params = make_params(cases, vocab)
    window = torch.arange(len(cases), dtype=torch.int32).flip(0)
    length = torch.randint(0, 1 << 20, window.shape, dtype=torch.int32)
    z = torch.randn(len(window), vocab) * 3
    z = z.round() if ties else z
    z[:, 3] = -torch.inf
    for random, truncated in ((True, True), (True, False), (False, False)):
        flags = {"random": random, "truncated": truncated}
        expected = choose_reference(z, window, length, params, **flags)
        actual = column.step.choose(z, window, length, params, **flags)
        assert actual.status.tolist() == expected.status.tolist()
        assert actual.ids.tolist() == expected.ids.tolist()


def test_rows_without_a_choice_say_why(column: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surestep_kernels.choose.vocab.MAX_PARTS", 2)
    params = make_params([(0.0, OFF), (1.0, OFF), (1.0, {**OFF, "top_p": 0.5})], 1500)
    z = torch.randn(12, 1500)
    z[0:3, 700], z[3:6, 1499], z[6:9] = torch.nan, torch.inf, -torch.inf
    window = torch.arange(3, dtype=torch.int32).repeat(4)
    length = torch.full((12,), 9, dtype=torch.int32)
    chosen = column.step.choose(z, window, length, params, random=True, truncated=True)
    expected = [RowStatus.NON_FINITE] * 6 + [RowStatus.NO_CANDIDATE] * 3 + [RowStatus.OK] * 3
    assert chosen.status.tolist() == expected
    assert chosen.ids[:9].tolist() == [0] * 9
    assert chosen.ids[9].item() == int(z[9].argmax())


def test_noise_is_that_of_the_cpu_to_the_last_bit(
    column: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits leave the choice to the noise alone, for many seeds and positions."""
    monkeypatch.setattr("surestep_kernels.choose.vocab.MAX_PARTS", 1)
    rows, vocab = 40, 300
    params = make_params([(1.0, OFF)] * rows, vocab)
    window, length = (torch.arange(rows, dtype=torch.int32) * step for step in (1, 7919))
    seeds = (params.seed_high.long() << 32) | (params.seed_low.long() & 0xFFFFFFFF)
    noise = gumbel_noise(torch.arange(vocab), seeds, length.long())
    z = torch.zeros(rows, vocab)
    chosen = column.step.choose(z, window, length, params, random=True, truncated=False)
    assert chosen.ids.tolist() == noise.argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 33, 1025])
@pytest.mark.parametrize(
    ("column", "count"), [("c", 0), ("c", 1), ("c", 40), ("triton", 7)], indirect=["column"]
)
def test_tokens_are_chosen(column: KernelSet, reference: KernelSet, count: int, vocab: int) -> None:
    rules = [
        OFF,
        {**OFF, "top_k": 3},
        {**OFF, "top_p": 0.7},
        {"min_p": 0.1, "top_k": 5, "top_p": 0.9},
    ]
    params = make_params([(t, rule) for t in (0.0, 0.7, 1e30) for rule in rules], vocab)
    params = params._replace(top_k=params.top_k.clamp(max=vocab))
    z, window = torch.randn(count, vocab).mul(3).round(), randint(0, 12, count)
    length = randint(0, 1 << 30, count)
    chosen = column.step.choose(z, window, length, params, random=True, truncated=True)
    if count == 0:
        assert [len(column) for column in chosen] == [0, 0]
        return
    expected = reference.step.choose(z, window, length, params, random=True, truncated=True)
    assert torch.equal(chosen.ids, expected.ids)
    assert torch.equal(chosen.status, expected.status)


def test_a_choice_does_not_depend_on_threads_and_neighbours(native: KernelSet) -> None:
    params = make_params([(0.8, {**OFF, "top_p": 0.9})] * 50, 3000)
    z, window = torch.randn(50, 3000), torch.arange(50, dtype=torch.int32)
    native.set_num_threads(3)
    together = native.step.choose(z, window, window, params, random=True, truncated=True).ids
    native.set_num_threads(1)
    for n in range(50):
        only = window[n : n + 1]
        alone = native.step.choose(z[n : n + 1], only, only, params, random=True, truncated=True)
        assert alone.ids.item() == together[n]
