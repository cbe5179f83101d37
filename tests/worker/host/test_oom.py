"""Kills by the kernel, as its counters tell of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from surestep_worker.host.oom import OomKills

MACHINE = "pgfault 12\noom_kill {}\nnr_free_pages 7\n"
CGROUP = "low 0\nhigh 0\nmax 3\noom 1\noom_kill {}\noom_group_kill 9\n"


@pytest.fixture
def counters(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "vmstat", tmp_path / "memory.events"]
    for path, text in zip(files, (MACHINE, CGROUP), strict=True):
        path.write_text(text.format(4))
    return files


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_counters_rises(counters: list[Path], which: int) -> None:
    oom = OomKills(counters)
    assert not oom.explain()
    counters[which].write_text((MACHINE, CGROUP)[which].format(5))
    assert oom.explain()


@pytest.mark.parametrize(("age", "explains"), [(0, True), (8, True), (10, False), (30, False)])
def test_what_happened_long_ago_explains_nothing(
    counters: list[Path], age: int, explains: bool
) -> None:
    oom = OomKills(counters)
    counters[0].write_text(MACHINE.format(5))
    for second in range(1, age + 1):
        oom.look(float(second))
    assert oom.explain() == explains


def test_one_kill_explains_one_death(counters: list[Path]) -> None:
    oom = OomKills(counters)
    for path, text in zip(counters, (MACHINE, CGROUP), strict=True):  # both count it
        path.write_text(text.format(5))
    assert [oom.explain(), oom.explain()] == [True, False]
    counters[1].write_text(CGROUP.format(6))
    assert [oom.explain(), oom.explain()] == [True, False]


def test_it_looks_once_a_second(counters: list[Path]) -> None:
    oom = OomKills(counters)
    for tick in range(1, 100):
        oom.look(5.0 + tick / 200)
    counters[0].write_text(MACHINE.format(5))
    for tick in range(1, 1000):
        oom.look(6.0 + tick / 5000)
    assert oom.explain()


def test_counters_that_are_not_there_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("oom_kill\noom_kill many\n")
    oom = OomKills([tmp_path / "missing", tmp_path / "odd"])
    oom.look(1.0)
    assert not oom.explain()


def test_this_machine_has_counters() -> None:
    oom = OomKills()
    oom.look(1.0)
    assert not oom.explain()
