"""Packages and pages stay free of words that gave way to others: retired_words.txt lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from repo.source import PACKAGES, ROOT, code, tracked

_PAGES = [name for name in tracked() if name == "README.md" or Path(name).match("docs/*/*.md")]
_ALLOWED = {  # where a word is the right one
    "surestep_cli": {
        "patience": "the flag --patience-s of surestep verify",
        "verdict": "what surestep verify reports",
    },
    "docs": {
        "patience": "that flag, one of a benchmark, and the chart's gateway.patienceSeconds",
        "verdict": "that report",
    },
}
_LIST = Path(__file__).with_name("retired_words.txt")
_BEFORE_CAPITALS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

Lines = Iterable[tuple[str, str]]  # where it stands, text


def _retired() -> dict[str, str]:
    """Term by retired word."""
    lines = [line for line in _LIST.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.partition(" -> ") for line in lines]
    assert all(word and term for word, _, term in pairs)
    return {word: term for word, _, term in pairs}


def _lines(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of files, and the name of each."""
    for name in files:
        yield name, Path(name).name
        text = (ROOT / name).read_text(encoding="utf-8")
        yield from ((f"{name}:{n}", line) for n, line in enumerate(text.splitlines(), 1))


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Matches whole words, also as parts of names with underscores; a file's name as a whole."""
    return re.compile(
        "|".join(
            rf"^{re.escape(word)}$" if word.endswith(".py") else rf"(?<![A-Za-z]){word}(?![a-z])"
            for word in words
        )
    )


def _found(lines: Lines, allowed: Iterable[str] = ()) -> list[str]:
    retired = {word: term for word, term in _retired().items() if word not in allowed}
    exact = _pattern(word for word in retired if not word.islower())
    any_case = _pattern(word for word in retired if word.islower())
    found = []
    for place, line in lines:
        small = _BEFORE_CAPITALS.sub("_", line).lower()
        words = {*exact.findall(line), *any_case.findall(small)}
        found += [f"{place} {word}: {retired[word]}" for word in sorted(words)]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_free_of_retired_words(package: str) -> None:
    assert _found(_lines(code(package)), _ALLOWED.get(package, ())) == []


def test_pages_are_free_of_retired_words() -> None:
    assert len(_PAGES) > 20
    assert _found(_lines(_PAGES), _ALLOWED.get("docs", ())) == []


@pytest.mark.parametrize("place", _ALLOWED)
def test_what_is_allowed_is_used(place: str) -> None:
    lines = _lines(code(place) if place in PACKAGES else _PAGES)
    assert {one.split(" ")[1].rstrip(":") for one in _found(lines)} == set(_ALLOWED[place])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"""For whoever reads."""', ["whoever"]),
        ('_old = Patience  # Nobody else, "nobody"', ["nobody", "patience"]),
        ("def f(k_cap): return plan.armed", ["armed", "k_cap"]),
        ("class LiveRows(OpenRequest):", ["OpenRequest", "live_rows"]),
        ("link.py", ["link.py"]),
        ("whomever = alarms + k_caps + open_request + 'a link.py'", []),
    ],
)
def test_retired_words_are_found(line: str, words: list[str]) -> None:
    assert [one.split(" ")[1].rstrip(":") for one in _found([("x.py:1", line)])] == words


def test_the_list_is_in_order() -> None:
    words = [w for w in _LIST.read_text().splitlines() if not w.startswith("#")]
    assert words == sorted(words, key=str.lower)
