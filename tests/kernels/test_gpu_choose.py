from __future__ import annotations

import pytest
import torch
from support.kernels.cases import interpreted_in_turn
from support.kernels.draw_params import OFF, make_params, to
from support.kernels.step_column import StepColumn
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
    column: StepColumn,
    vocab: int,
    parts: int,
    ties: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops, device = column
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
        actual = ops.choose(
            z.to(device), window.to(device), length.to(device), to(params, device), **flags
        )
        assert actual.status.cpu().tolist() == expected.status.tolist()
        assert actual.ids.cpu().tolist() == expected.ids.tolist()


def test_rows_without_a_choice_say_why(column: StepColumn, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, device = column
    monkeypatch.setattr("surestep_kernels.choose.vocab.MAX_PARTS", 2)
    params = make_params([(0.0, OFF), (1.0, OFF), (1.0, {**OFF, "top_p": 0.5})], 1500)
    z = torch.randn(12, 1500)
    z[0:3, 700], z[3:6, 1499], z[6:9] = torch.nan, torch.inf, -torch.inf
    window = torch.arange(3, dtype=torch.int32).repeat(4)
    length = torch.full((12,), 9, dtype=torch.int32)
    chosen = ops.choose(
        z.to(device),
        window.to(device),
        length.to(device),
        to(params, device),
        random=True,
        truncated=True,
    )
    expected = [RowStatus.NON_FINITE] * 6 + [RowStatus.NO_CANDIDATE] * 3 + [RowStatus.OK] * 3
    assert chosen.status.tolist() == expected
    assert chosen.ids[:9].tolist() == [0] * 9
    assert chosen.ids[9].item() == int(z[9].argmax())


def test_noise_is_that_of_the_cpu_to_the_last_bit(
    column: StepColumn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits leave the choice to the noise alone, for many seeds and positions."""
    ops, device = column
    monkeypatch.setattr("surestep_kernels.choose.vocab.MAX_PARTS", 1)
    rows, vocab = 40, 300
    params = make_params([(1.0, OFF)] * rows, vocab)
    window, length = (torch.arange(rows, dtype=torch.int32) * step for step in (1, 7919))
    seeds = (params.seed_high.long() << 32) | (params.seed_low.long() & 0xFFFFFFFF)
    noise = gumbel_noise(torch.arange(vocab), seeds, length.long())
    z = torch.zeros(rows, vocab, device=device)
    chosen = ops.choose(
        z, window.to(device), length.to(device), to(params, device), random=True, truncated=False
    )
    assert chosen.ids.tolist() == noise.argmax(dim=1).tolist()
