"""Packages grow openly: line_budget.txt says how many lines each may have.

A budget leaves a little room. A commit that needs more raises it; when a package has become much
smaller, its budget comes down too. The tests are to become smaller than the product.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from repo.source import PACKAGES, ROOT, code, sources

_LIST = Path(__file__).with_name("line_budget.txt")
_ROOM = 0.02  # of a package's lines, that a new budget leaves
_IDLE = 0.05  # that no budget may leave
_TESTS = 0.952  # of the product's lines that tests may have: only ever lowered; the aim is 0.9


def _budgets() -> dict[str, int]:
    lines = [line for line in _LIST.read_text().splitlines() if not line.startswith("#")]
    return {name: int(most) for name, most in map(str.split, lines)}


def _lines(package: str) -> int:
    return sum(len((ROOT / name).read_text().splitlines()) for name in code(package))


def _problem(lines: int, budget: int) -> str | None:
    fitting = int(lines * (1 + _ROOM))
    if lines > budget:
        return f"{lines} lines, over its budget of {budget}: shorten it, or say {fitting}"
    if budget > lines * (1 + _IDLE):
        return f"{lines} lines, far under its budget of {budget}: say {fitting}"
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_keeps_to_its_budget(package: str) -> None:
    problem = _problem(_lines(package), _budgets()[package])
    assert problem is None, f"{package} has {problem} in {_LIST.relative_to(ROOT)}"


def test_every_package_has_a_budget() -> None:
    assert list(_budgets()) == sorted(PACKAGES)


def test_tests_do_not_outgrow_the_product() -> None:
    tests = [source for source in sources() if source.name.startswith("tests/")]
    lines = sum(len(source.text.splitlines()) for source in tests)
    ratio = lines / sum(map(_lines, PACKAGES))
    assert _TESTS - 0.03 < ratio <= _TESTS, f"tests have {ratio:.3f} of the product's lines"


@pytest.mark.parametrize(
    ("lines", "budget", "word"),
    [(1001, 1000, "over"), (1000, 1000, None), (1000, 1050, None), (1000, 1051, "under")],
)
def test_both_ways_out_of_a_budget_are_seen(lines: int, budget: int, word: str | None) -> None:
    problem = _problem(lines, budget)
    assert problem is None if word is None else word in str(problem)
    assert _problem(lines, int(lines * (1 + _ROOM))) is None
