"""What benchmarks/faults.py makes of two runs of the same streams."""

from __future__ import annotations

import faults
from fault_stream import Stream

ARGS = faults.parse(["--max-tokens", "4", "--name", "toy"])


def test_a_stream_resumes_behind_its_longest_pause_after_the_fault() -> None:
    stream = Stream(token_ids=[1, 2, 3, 4], times=[0.0, 1.0, 5.0, 5.5])
    assert stream.resumed_s(0.5) == 4.5  # what was on its way at 0.5 came at 1.0
    assert stream.resumed_s(6.0) is None


def test_lost_streams_and_tokens_are_counted() -> None:
    quiet = [Stream([1, 2, 3, 4], [0, 1, 2, 3]) for _ in range(4)]
    hurt = [
        Stream([1, 2, 3, 4], [0.0, 1.0, 7.0, 8.0]),
        Stream([1, 2, 2, 3, 4], [0.0, 1.0, 5.0, 8.0]),
        Stream([1, 2, 4], [0.0, 1.0, 6.0]),
        Stream([1], [0.0], failure="broken off"),
    ]
    cost = faults.cost("SIGKILL rank", quiet, hurt, 1.0, 0.25, ARGS)
    assert (cost.lost, cost.streams, cost.failure) == (1, 4, "broken off")
    assert (cost.missing, cost.repeated, cost.equal) == (1, 1, 1)
    assert cost.first_token_s == (5.0, 6.0)
    assert faults.row(cost) == (
        "| toy | SIGKILL rank | 1 of 4 | 0.25 | 5.00 | 6.00 | 1 | 1 | 1 of 4 | broken off |"
    )


def test_only_new_incidents_count() -> None:
    old = {"epoch": 1, "detect_s": 9.0}
    new = {"epoch": 2, "detect_s": 0.5}
    before = {"incidents": [old]}
    assert faults.detected(before, {"incidents": [new, old]}) == 0.5
    assert faults.detected(before, before) is None
    assert faults.detected({}, {}) is None
