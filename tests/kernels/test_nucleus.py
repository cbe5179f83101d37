"""Which tokens may be drawn: every rule against the reference, by lists and by whole rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.kernels.draw_params import OFF, make_params, to
from surestep_kernels.choose import (
    DrawParams,
    candidates,
    choose_reference,
    mass_of,
    nucleus,
    vocab,
)
from surestep_kernels.choose import reference as reference
from surestep_kernels.choose.rest import SLACK
from surestep_kernels.choose.triton import choose
from surestep_kernels.choose.triton_mass import mass_of as device_mass_of
from torch import Tensor

DENORMAL, LARGEST = 1e-45, 3.4028234663852886e38
LOGITS = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.0, 2.0, 2.25, 3.0, -1.0, -30.0, 3e38, -np.inf])
RULES = st.fixed_dictionaries(
    {
        "min_p": st.sampled_from([0.0, 0.0, DENORMAL, 0.05, 0.4, 1.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 17, 36, 37, 200]),
        "top_p": st.sampled_from([1.0, DENORMAL, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24]),
    }
)
TEMPERATURES = st.sampled_from([0.0, DENORMAL, 0.3, 1.0, 1.0, 5.0, 1e30, LARGEST])
SMALL = settings(
    max_examples=30,
    phases=(Phase.generate,),  # shrinking takes minutes in the interpreter
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Ran(NamedTuple):
    """What a launch leaves."""

    ids: list[int]
    lists: candidates.CandidateLists

    @property
    def whole(self) -> list[int]:
        """Rows that are drawn from whole, in order."""
        return sorted(self.lists.whole[: int(self.lists.counts[1])].tolist())


class Sizes(NamedTuple):
    """Small ones of lists and parts, and of the tokens of a row that are searched together."""

    capacity: int = 512
    wanted: int = 100
    parts: int = 3
    row_block: int = 128
    short: int = 64


def run(gpu: str, z: Tensor, params: DrawParams, sizes: Sizes, first: int = 40) -> Ran:
    """Row n is drawn with the parameters of window n, at index first + n."""
    made: list[candidates.CandidateLists] = []

    class Kept(candidates.CandidateLists):
        @classmethod
        def for_rows(cls, *args: Any, **options: Any) -> candidates.CandidateLists:
            made.append(candidates.CandidateLists.for_rows(*args, **options))
            return made[-1]

    window = torch.arange(len(z), dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(candidates, "CAPACITY", sizes.capacity)
        patch.setattr(nucleus, "SHORT", sizes.short)
        patch.setattr(candidates, "WANTED", sizes.wanted)
        patch.setattr(nucleus, "ROW_BLOCK", sizes.row_block)
        patch.setattr(vocab, "MAX_PARTS", sizes.parts)
        patch.setattr("surestep_kernels.choose.triton.CandidateLists", Kept)
        inputs = z.to(gpu), window.to(gpu), (first + window).to(gpu), to(params, gpu)
        chosen = choose(*inputs, random=True, truncated=True)
    lists = candidates.CandidateLists(*(column.cpu() for column in made[0]))
    return Ran(chosen.ids.tolist(), lists)


def gaps_of(z: Tensor, params: DrawParams) -> Tensor:
    return (z.amax(dim=1, keepdim=True) + 0.0 - z) / params.temperature.unsqueeze(1)


def check(z: Tensor, params: DrawParams, ran: Ran) -> None:
    """The same tokens as those of the reference, and the same ones to draw them from."""
    window = torch.arange(len(z), dtype=torch.int32)
    expected = choose_reference(z, window, 40 + window, params, random=True, truncated=True)
    assert ran.ids == expected.ids.tolist()
    gap = gaps_of(z, params)
    bits, ids = gap.view(torch.int32).long(), torch.arange(z.shape[1])
    kept = (bits << vocab.id_bits_of(z.shape[1]) | ids) <= ran.lists.limit.unsqueeze(1)
    draws = (params.temperature > 0) & z.amax(dim=1).isfinite()
    may = reference._kept(gap, params) & gap.isfinite()
    assert torch.equal((kept & gap.isfinite())[draws], may[draws])


@SMALL
@given(
    cases=st.lists(st.tuples(TEMPERATURES, RULES), min_size=1, max_size=3),
    size=st.sampled_from([37, 1, 130, 200]),
    sizes=st.builds(
        Sizes,
        capacity=st.sampled_from([1, 8, 64, 256]),
        wanted=st.sampled_from([1, 4, 50]),
        parts=st.integers(1, 2),
        row_block=st.sampled_from([64, 128]),
        short=st.sampled_from([1, 8, 64]),
    ),
    values=st.lists(LOGITS, min_size=50, max_size=50),
    seed=st.integers(0, 99),
)
@pytest.mark.rotates(3)
def test_every_rule_leaves_what_the_reference_leaves(
    gpu: str,
    cases: list[tuple[float, dict[str, float]]],
    size: int,
    sizes: Sizes,
    values: list[float],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(0, len(values), (len(cases), size), generator=generator)
    z = torch.tensor(values)[place]
    params = make_params(cases, size)
    ran = run(gpu, z, params, sizes)
    check(z, params, ran)
    last = DrawParams(*(column[-1:] for column in params))
    alone = run(gpu, z[-1:], last, Sizes(), first=40 + len(cases) - 1)
    assert alone.ids == ran.ids[-1:]


PEAKED = {
    "top_k": {**OFF, "top_k": 20},
    "top_p": {**OFF, "top_p": 0.9},
    "min_p": {**OFF, "min_p": 0.05},
    "all": {"min_p": 0.01, "top_k": 50, "top_p": 0.95},
}


@pytest.mark.parametrize("ties", [False, True])
def test_peaked_rows_are_settled_by_their_lists(gpu: str, ties: bool) -> None:
    """Among many tokens, with several to a group, and with forbidden ones."""
    sizes = Sizes(capacity=256, wanted=100)
    params = make_params([(0.8, rule) for rule in PEAKED.values()], 6000)
    z = torch.randn(len(PEAKED), 6000, generator=torch.Generator().manual_seed(5))
    z = (z * 8).round() / 8 if ties else z
    z[:, [3, 700, 701, 5999]] += torch.tensor([9.0, 8.0, 8.0, 7.5])
    z[:, 100:200] = -torch.inf
    ran = run(gpu, z, params, sizes)
    check(z, params, ran)
    assert ran.whole == []
    top_k, top_p, *_ = ran.lists.listed.tolist()
    assert candidates.FEWEST <= top_k <= 120
    assert 100 <= top_p <= 200


def test_flat_rows_are_searched_themselves(gpu: str) -> None:
    rules = [
        {**OFF, "top_k": 41},  # more than are wanted, fewer than are listed with them
        {**OFF, "top_k": 900},
        {**OFF, "top_p": 0.9},
        {**OFF, "min_p": 0.001},
        {"min_p": 0.01, "top_k": 800, "top_p": 0.9},
    ]
    params = make_params([(1.0, rule) for rule in rules], 1000)
    z = torch.randn(len(rules), 1000, generator=torch.Generator().manual_seed(6))
    ran = run(gpu, z, params, Sizes(capacity=64, wanted=40))
    check(z, params, ran)
    assert ran.whole[-4:] == [1, 2, 3, 4]


def test_equals_that_overflow_the_list_are_told_apart_by_their_ids(gpu: str) -> None:
    rules = [{**OFF, "top_k": 70}, {**OFF, "top_p": 0.5}, {**OFF, "min_p": 1.0}]
    params = make_params([(1.0, rule) for rule in rules], 200)
    ran = run(gpu, torch.zeros(3, 200), params, Sizes(capacity=16, wanted=4))
    check(torch.zeros(3, 200), params, ran)
    last = ran.lists.limit & ((1 << vocab.id_bits_of(200)) - 1)
    assert last[:2].tolist() == [69, 99]
    assert ran.whole == [0, 1, 2]


def test_few_allowed_tokens_fit_any_list(gpu: str) -> None:
    """What is infinitely far is no candidate, or a grammar would make every row overflow."""
    z = torch.full((2, 300), -torch.inf)
    z[:, [7, 150, 299]] = torch.tensor([1.0, 0.5, 0.9])
    params = make_params([(1.0, {**OFF, "top_p": 0.95}), (1.0, {**OFF, "top_k": 2})], 300)
    ran = run(gpu, z, params, Sizes(capacity=4, wanted=100))
    check(z, params, ran)
    assert ran.whole == []
    assert ran.lists.listed.tolist() == [3, 3]


def test_rows_of_all_kinds_stand_beside_each_other(gpu: str) -> None:
    """Greedy ones are in no list; what a row draws does not depend on its neighbours."""
    rules = [OFF, {**OFF, "top_k": 5}, OFF, {**OFF, "top_p": 0.99}, {**OFF, "top_p": 0.3}]
    temperatures = [0.0, 1.0, 1.0, 1.0, 0.0]
    params = make_params(list(zip(temperatures, rules, strict=True)), 150)
    z = torch.randn(5, 150, generator=torch.Generator().manual_seed(8))
    sizes = Sizes(capacity=32, wanted=8)
    ran = run(gpu, z, params, sizes)
    assert ran.lists.restricted[: int(ran.lists.counts[0])].sort().values.tolist() == [1, 3]
    assert ran.whole == [2, 3]
    window = torch.arange(5, dtype=torch.int32)
    expected = choose_reference(z, window, 40 + window, params, random=True, truncated=True)
    assert ran.ids == expected.ids.tolist()
    assert ran.ids[0] == int(z[0].argmax())


def edges(z: Tensor, count: int) -> list[float]:
    """top_p f32 at which a nucleus of so many tokens just reaches as far, and the next ones."""
    mass = mass_of((z.max() - z).sort().values)
    edge = (mass[:count].sum().double() / mass.sum().double()).float()
    towards = torch.tensor((0.0, 1.0))
    return [float(edge), *edge.nextafter(towards).tolist()]


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_nucleus_that_ends_at_its_very_edge_is_measured_exactly(gpu: str, spread: float) -> None:
    """The weight of what is not listed leaves it open there."""
    z = torch.randn(1, 3000, generator=torch.Generator().manual_seed(9)) * spread
    shares = [share for count in (1, 7) for share in edges(z[0], count)]
    z[0, z.argmax()] += 2.0  # or nobody's nucleus is as small as its list
    shares += [share for count in (1, 7) for share in edges(z[0], count)]
    z = z.expand(len(shares), -1).contiguous()
    params = make_params([(1.0, {**OFF, "top_p": share}) for share in shares], 3000)
    ran = run(gpu, z, params, Sizes(capacity=512, wanted=80))
    check(z, params, ran)
    assert ran.whole == []


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_what_is_not_listed_weighs_what_its_bounds_say(gpu: str, temperature: float) -> None:
    rules = [{**OFF, "top_p": share} for share in (0.05, 0.6, 0.9)]
    params = make_params([(temperature, rule) for rule in rules], 9000)
    z = torch.randn(3, 9000, generator=torch.Generator().manual_seed(3)) * 4
    z[2, 50:] = -torch.inf
    ran = run(gpu, z, params, Sizes(capacity=2048, wanted=150))
    lists, gap = ran.lists, gaps_of(z, params)
    used = torch.arange(lists.rests.shape[1]) * vocab.GROUPS < lists.chosen.unsqueeze(1)
    weight = lists.rest + torch.where(used, lists.rests, 0.0).sum(dim=1)
    exact = torch.where(gap.view(torch.int32) > lists.near.unsqueeze(1), mass_of(gap), 0).sum(dim=1)
    assert (exact > 0).tolist() == [True, True, False]
    off = (weight.double() * 2**40 - exact).abs()
    assert (off <= exact * SLACK / 4 + z.shape[1]).all()


@pytest.mark.parametrize("capacity", [1, 64])
def test_min_p_ends_at_its_very_gap(gpu: str, capacity: int) -> None:
    """A token that lies there is left, and weighs; the next number is beyond it."""
    rules = [{**OFF, "min_p": 0.4}, {**OFF, "min_p": 0.4, "top_p": 0.84}]
    params = make_params([(1.0, rule) for rule in rules], 4)
    last = params.max_gap[0]
    z = torch.stack((-last.nextafter(torch.tensor(9.0)), *torch.tensor([0.0, 0.0]), -last))
    ran = run(gpu, z.repeat(2, 1), params, Sizes(capacity=capacity))
    check(z.repeat(2, 1), params, ran)
    assert ran.lists.listed.tolist() == [3, 3]
    # 0.84 of a mass of 2.4 is more than the two best have; of 2.0 it were less.
    assert (ran.lists.limit & 3).tolist() == [3, 3]


@triton.jit  # type: ignore[untyped-decorator]
def _mass_kernel(gap_ptr, mass_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(gap_ptr + at).to(tl.int32, bitcast=True)
    tl.store(mass_ptr + at, device_mass_of(bits))


def test_mass_is_that_of_the_reference_and_of_exp(gpu: str) -> None:
    """To the last bit, and nearly."""
    gap = torch.linspace(0, 30, 1 << 15)
    gap[-3:] = torch.tensor([math.inf, DENORMAL, 1e38])
    mass = torch.empty(1 << 15, dtype=torch.int64, device=gpu)
    _mass_kernel[(1 << 5,)](gap.to(gpu), mass, BLOCK=1 << 10, enable_fp_fusion=False)
    mass = mass.cpu()
    assert torch.equal(mass, mass_of(gap))
    exact = torch.exp(-gap.double()) * 2**40
    assert ((mass - exact).abs() <= exact * 2**-23 + 1).all()
    assert mass[0] == mass[-2] == 1 << 40
    assert mass[-1] == mass[-3] == 0
