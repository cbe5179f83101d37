"""The choice of a scheduler: what holds for any prefixes, loads and numbers of schedulers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from surestep_common.tenants import cache_root
from surestep_gateway.schedulers.pool import RoutingCandidate, choose, prefix_key

IDS = st.lists(st.integers(0, 300_000), max_size=300)
NAMES = st.tuples(st.text("ab", max_size=4), st.text("ab", max_size=4))  # owner, salt
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


def candidates(loads: list[int]) -> list[RoutingCandidate]:
    return [RoutingCandidate(f"host{i}:50051", load) for i, load in enumerate(loads)]


@given(IDS, IDS, IDS)
def test_equal_prefixes_meet(prefix: list[int], one: list[int], other: list[int]) -> None:
    prefix = (prefix or [1]) * 256
    assert prefix_key(b"root", prefix + one) == prefix_key(b"root", prefix + other)


@given(IDS, NAMES, NAMES)
def test_owners_and_salts_part(
    ids: list[int], one: tuple[str, str], other: tuple[str, str]
) -> None:
    """Also where an owner and a salt, written one behind the other, are those of another."""
    keys = [prefix_key(cache_root(owner, salt), ids) for owner, salt in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@given(IDS, LOADS, st.data())
def test_a_full_one_only_where_all_are(
    ids: list[int], loads: list[int], data: st.DataObject
) -> None:
    full = [data.draw(st.booleans()) for _ in loads]
    listed = [
        one._replace(full=is_full) for one, is_full in zip(candidates(loads), full, strict=True)
    ]
    chosen = choose(prefix_key(b"", ids), listed)
    assert not full[chosen] or all(full)


@given(IDS, LOADS, st.integers(1, 1000))
def test_none_waits_while_the_least_loaded_has_room(
    ids: list[int], loads: list[int], slots: int
) -> None:
    listed = [one._replace(num_slots=slots) for one in candidates(loads)]
    assert loads[choose(prefix_key(b"", ids), listed)] < slots or min(loads) >= slots


@given(IDS, LOADS)
def test_away_from_home_only_where_that_is_clearly_busier(ids: list[int], loads: list[int]) -> None:
    key, listed = prefix_key(b"", ids), candidates(loads)
    home, chosen = choose(key, candidates([0] * len(loads))), choose(key, listed)
    assert (chosen != home) == (loads[home] > 4 + 1.5 * min(loads))
    assert chosen == home or loads[chosen] < loads[home]


@given(st.lists(st.integers(0, 99), min_size=4, max_size=40))
def test_not_all_run_to_the_least_loaded(loads: list[int]) -> None:
    """They go to few, so that their prefix is found there, and to the less loaded of these."""
    key, home = prefix_key(b"", [1]), choose(prefix_key(b"", [1]), candidates([0] * len(loads)))
    loads[home] = 300
    counts = Counter(choose(key, candidates(loads)) for _ in range(60))
    assert home not in counts
    assert 2 <= len(counts) <= 4


@given(IDS, st.integers(1, 8))
def test_the_order_of_the_list_does_not_matter(ids: list[int], count: int) -> None:
    key, listed = prefix_key(b"", ids), candidates([0] * count)
    turned = listed[::-1]
    assert listed[choose(key, listed)] == turned[choose(key, turned)]


@given(IDS, st.integers(2, 8), st.data())
def test_one_that_goes_away_moves_only_its_own(
    ids: list[int], count: int, data: st.DataObject
) -> None:
    key, listed = prefix_key(b"", ids), candidates([0] * count)
    chosen = choose(key, listed)
    gone = data.draw(st.integers(0, count - 1).filter(lambda i: i != chosen))
    rest = [one for i, one in enumerate(listed) if i != gone]
    assert rest[choose(key, rest)] == listed[chosen]


def test_prefixes_spread_evenly() -> None:
    listed = candidates([0] * 4)
    counts = Counter(choose(prefix_key(b"", [i]), listed) for i in range(4000))
    assert all(900 < counts[i] < 1100 for i in range(4))
