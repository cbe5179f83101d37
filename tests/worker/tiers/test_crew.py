"""Threads that hang hold up nobody."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from surestep_worker.tiers.crew import Crew


def test_work_is_done_in_order_and_raises_where_it_is_waited_for() -> None:
    crew, done = Crew(1, "crew"), list[int]()
    futures = [crew.submit(done.append, number) for number in range(5)]
    wrong = crew.submit(int, "x")
    crew.close(30)
    assert all(future.done() for future in futures)
    assert done == list(range(5))
    with pytest.raises(ValueError, match="invalid literal"):
        wrong.result(0)


def test_several_work_at_once() -> None:
    crew, both = Crew(2, "crew"), threading.Barrier(2)
    for future in [crew.submit(both.wait, 30) for _ in range(2)]:
        future.result(30)
    crew.close(30)


def test_a_process_ends_with_a_thread_that_hangs() -> None:
    hang = "from surestep_worker.tiers.crew import Crew; import threading; c = Crew(1, 'c'); "
    hang += "c.submit(threading.Event().wait); c.close(0.1)"
    subprocess.run([sys.executable, "-c", hang], check=True, timeout=60)
