"""Gumbel noise: equal to its specification, uniform, independent, and honest in the tail."""

from __future__ import annotations

import math

import pytest
import torch
from support.references.gumbel_draw import argmax, gumbel_argmax
from support.references.sampling import gumbel, uniform
from surestep_kernels.choose import gumbel_noise

GOLDEN = [  # seed, position, id, noise; a change here changes every seeded output ever given
    (0, 0, 0, 1.1987208100042217),
    (0, 0, 1, 0.12401567435071505),
    (0, 1, 0, -0.24662973406861105),
    (1, 0, 0, 1.5840542110092126),
    (2**64 - 1, 4095, 151_935, -1.8334109344744953),
    (0x0123456789ABCDEF, 131_071, 49_151, 0.9480469274944057),
]


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


def _noise(seeds: list[int], positions: list[int], ids: torch.Tensor) -> torch.Tensor:
    return gumbel_noise(ids, torch.tensor([_signed(s) for s in seeds]), torch.tensor(positions))


@pytest.mark.parametrize(("seed", "position", "token_id", "noise"), GOLDEN)
def test_golden_values(seed: int, position: int, token_id: int, noise: float) -> None:
    assert gumbel(seed, position, token_id) == pytest.approx(noise, abs=1e-12)
    got = _noise([seed], [position], torch.tensor([token_id])).item()
    assert got == torch.tensor(noise, dtype=torch.float64).float().item()


def test_equals_the_scalar_specification() -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1], [0, 5, 4096, 2**31 + 7]
    ids = torch.cat([torch.arange(200), torch.arange(151_800, 152_000)])
    got = _noise(seeds, positions, ids)
    want = [[gumbel(s, p, i) for i in ids.tolist()] for s, p in zip(seeds, positions, strict=True)]
    assert torch.equal(got, torch.tensor(want, dtype=torch.float64).float())


def test_columns_may_carry_their_own_ids() -> None:
    ids = torch.tensor([[7, 3, 900], [900, 7, 1]])
    got = _noise([5, 6], [1, 2], ids)
    assert torch.equal(got[0], _noise([5], [1], ids[0])[0])
    assert torch.equal(got[1], _noise([6], [2], ids[1])[0])


def test_is_uniform_and_finite() -> None:
    """4e6 values: every one of 1000 bins holds its share, and nothing is infinite."""
    noise = _noise([11] * 80, list(range(80)), torch.arange(50_000))
    assert bool(noise.isfinite().all())
    counts = torch.histc(torch.exp(-torch.exp(-noise.double())), bins=1000, min=0, max=1)
    chi_square = ((counts - 4000) ** 2 / 4000).sum().item()
    assert chi_square < 999 + 5 * math.sqrt(2 * 999)


def test_tail_is_neither_cut_nor_thin() -> None:
    """24-bit uniforms could give no more than 16.6."""
    assert _noise([26], [48], torch.tensor([50_009])).item() == pytest.approx(19.3185, abs=1e-4)
    assert gumbel(26, 48, 50_009) == pytest.approx(19.3185, abs=1e-4)
    beyond = (_noise([1] * 80, list(range(80)), torch.arange(50_000)) > 10).sum().item()
    expected = 4e6 * -math.expm1(-math.exp(-10))
    assert abs(beyond - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("shift", ["seed", "position", "id"])
def test_neighbouring_keys_are_independent(shift: str) -> None:
    """Correlation with the noise of the next seed, position or id, over 1e6 values: < 5 sigma."""
    ids, rows = torch.arange(10_000), 100
    zero, count = [0] * rows, list(range(rows))
    first = _noise(zero, count, ids)
    second = {
        "seed": lambda: _noise([1] * rows, count, ids),
        "position": lambda: _noise(zero, [p + 1 for p in count], ids),
        "id": lambda: _noise(zero, count, ids + 1),
    }[shift]()
    both = torch.stack([first.flatten(), second.flatten()]).double()
    assert abs(torch.corrcoef(both)[0, 1].item()) < 5 / math.sqrt(both.shape[1])


def test_bits_of_the_uniform_are_balanced() -> None:
    n = 5_000
    for key in ((lambda i: (i, 0, 0)), (lambda i: (0, i, 0)), (lambda i: (0, 0, i))):
        words = [int(uniform(*key(i)) * (1 << 32)) for i in range(n)]
        for bit in range(32):
            ones = sum(word >> bit & 1 for word in words)
            assert abs(ones - n / 2) < 5 * math.sqrt(n) / 2, bit


def test_minus_infinity_never_wins() -> None:
    z = torch.full((5000, 8), -math.inf)
    z[:, 5] = -1e30
    ids = gumbel_argmax(z, torch.zeros(5000, dtype=torch.int64), torch.arange(5000))
    assert set(ids.tolist()) == {5}


def test_lowest_id_wins_ties() -> None:
    """Where the noise is lost in the rounding of huge logits, all scores are equal."""
    z = torch.full((50, 6), 1e30)
    seeds, positions = torch.zeros(50, dtype=torch.int64), torch.arange(50)
    assert set(gumbel_argmax(z, seeds, positions).tolist()) == {0}
    ids = torch.tensor([40, 7, 30, 9, 8, 7000]).expand(50, 6)
    assert set(gumbel_argmax(z, seeds, positions, ids).tolist()) == {7}


def test_chunks_do_not_show() -> None:
    z = torch.randn(37, 40_000, generator=torch.Generator().manual_seed(3))
    seeds, positions = torch.arange(37) * 977, torch.arange(37)
    alone = [gumbel_argmax(z[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(37)]
    assert torch.equal(gumbel_argmax(z, seeds, positions), torch.cat(alone))


@pytest.mark.parametrize("width", [1, 7, 64, 1000, 49_152])
def test_argmax_settles_ties_by_lowest_index(width: int) -> None:
    x = torch.zeros(3, width)
    x[1, width // 2 :] = 1
    x[2, -1] = math.nan
    assert argmax(x).tolist() == [0, width // 2, width - 1]
