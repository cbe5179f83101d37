"""Parameters are read before they are asked for, once each while the guess is right."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack

import pytest
from surestep_worker.host.read_ahead import ReadAhead


def test_reads_the_next_one_meanwhile_and_each_once() -> None:
    begun = {name: threading.Event() for name in "abc"}
    threads: dict[str, int] = {}

    def read(name: str) -> str:
        threads[name] = threading.get_ident()
        begun[name].set()
        return name.upper()

    with ExitStack() as stack:
        ahead = ReadAhead("abc", read, stack)
        assert ahead.get("a") == "A"
        assert begun["b"].wait(10), "nobody reads ahead"
        assert not begun["c"].is_set(), "more than one is in memory ahead"
        assert ahead.get("b") == "B"
        assert begun["c"].wait(10)
        assert ahead.get("c") == "C"
    assert threads["b"] == threads["c"] != threading.get_ident()


def test_another_order_gives_the_same_and_ends_guessing() -> None:
    times = Counter[str]()

    def read(name: str) -> str:
        times[name] += 1
        return name.upper()

    with ExitStack() as stack:
        ahead = ReadAhead("abcd", read, stack)
        assert [ahead.get(name) for name in "acbd"] == list("ACBD")
    assert times["b"] <= 2
    assert all(times[name] == 1 for name in "acd")


def test_an_error_is_raised_where_its_parameter_is_asked_for() -> None:
    def read(name: str) -> str:
        if name == "b":
            raise OSError("gone")
        return name

    with ExitStack() as stack:
        ahead = ReadAhead("abc", read, stack)
        assert ahead.get("a") == "a"
        with pytest.raises(OSError, match="gone"):
            ahead.get("b")
        assert ahead.get("c") == "c"
