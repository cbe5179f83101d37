"""What is captured when: by what steps want, a little at a time, and never at any price."""

from __future__ import annotations

import contextlib
import time
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from surestep_kernels.step_columns import HostColumn
from surestep_worker.step import graphs as module
from surestep_worker.step.batch import StepColumns
from surestep_worker.step.buckets import StepSize, make_buckets, padding
from surestep_worker.step.forward import PassOutputs
from surestep_worker.step.graphs import GraphKind, Graphs

NULL_SLOT = 8
BUCKETS = make_buckets(NULL_SLOT, 1, 1)


NOTHING = PassOutputs(*[cast(Any, None)] * 8)._replace(drafter_failed=False)


class Steps:
    """Counts what is run of each kind."""

    def __init__(self) -> None:
        self.ran = list[GraphKind]()
        self.breaks = False
        self.graphs = Graphs(BUCKETS, self._padding, self._run, torch.device("cpu"))

    def _padding(self, bucket: StepSize) -> StepColumns[HostColumn]:
        return padding(bucket, NULL_SLOT, has_draft_head=False)

    def _run(self, columns: StepColumns, kind: GraphKind) -> PassOutputs:
        self.ran.append(kind)
        if self.breaks:
            self.lose()
            raise RuntimeError("operation not permitted when stream is capturing")
        return NOTHING

    def lose(self) -> None:
        """Of the device, nothing."""


def size(rows: int) -> StepSize:
    return StepSize(rows, 1, rows, 1, rows, 0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(module, "_SHARE", 1.0)  # no rest between captures
    return Steps()


def test_everything_runs_once_before_anything_is_captured(steps: Steps) -> None:
    seen = list[int]()
    steps.graphs.warm_up(lambda: seen.append(len(steps.ran)))
    assert set(steps.ran) == {GraphKind(bucket, whole=True) for bucket in BUCKETS}
    assert seen == [*range(1, 1 + len(BUCKETS))]
    assert steps.graphs.num_captured == 0
    assert not is_due(steps.graphs)


def is_due(graphs: Graphs) -> bool:
    return graphs.due > 0


def capture_missed(graphs: Graphs) -> None:
    while (kind := graphs.most_missed) is not None:
        graphs.capture(kind)


def test_what_steps_want_most_comes_first_then_the_largest(steps: Steps) -> None:
    graphs = steps.graphs
    for rows in (1, 3, 3):
        assert graphs.find(size(rows), whole=True) is None
    assert graphs.num_missed == 3
    wanted = graphs.most_missed
    assert wanted is not None
    assert graphs.kind(graphs.due) == wanted
    graphs.capture_next()
    assert graphs.is_captured(wanted)
    assert graphs.find(size(3), whole=True) is not None
    assert graphs.find(size(1), whole=True) is None
    capture_missed(graphs)
    assert not is_due(graphs)
    assert graphs.find(size(1), whole=True) is not None
    assert graphs.find(size(8), whole=True) is None
    capture_missed(graphs)
    for _ in range(100):
        graphs.capture_next()
    assert graphs.num_captured == len(BUCKETS)  # parts of steps nobody has asked for


def test_a_part_serves_where_the_whole_does_not(steps: Steps) -> None:
    graphs = steps.graphs
    assert graphs.find(size(2), whole=False) is None
    capture_missed(graphs)
    found = graphs.find(size(2), whole=True)  # and the whole is wanted from now on
    assert found is not None
    assert is_due(graphs)
    capture_missed(graphs)
    assert graphs.find(size(2), whole=True) != found
    assert graphs.find(size(2), whole=False) == found


def test_what_cannot_be_captured_is_launched_singly(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Graphs, "_capture", refuse)
    assert steps.graphs.find(size(2), whole=True) is None
    capture_missed(steps.graphs)
    assert "are not captured" in caplog.text
    assert steps.graphs.find(size(2), whole=True) is None
    assert not is_due(steps.graphs)  # once is enough


class Torch211:
    """Captures as torch 2.11 makes them: one that breaks goes on recording to its pool."""

    def __init__(self, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording = set[int]()
        self.lost = False  # the context of the device
        pools, nothing = count(), SimpleNamespace(synchronize=self.synchronize, device_index=0)
        card = self

        class CUDAGraph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                if pool in card.recording:
                    raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
                card.recording.add(pool)
                self.pool = pool

            def capture_end(self) -> None:
                if made.breaks:
                    raise RuntimeError("operation failed due to a previous error during capture")
                card.recording.remove(self.pool)

        made: Steps = cast(Any, graphs._run).__self__
        instead = {
            "CUDAGraph": CUDAGraph,
            "graph_pool_handle": lambda: next(pools),
            "stream": lambda _: contextlib.nullcontext(),
            "current_stream": lambda _: nothing,
            "synchronize": self.synchronize,
            "mem_get_info": lambda _: (0, 0),
            "memory_reserved": lambda _: 0,
        }
        for name, value in instead.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        graphs._stream, graphs._pool = cast(Any, nothing), cast(Any, next(pools))

    def synchronize(self, *_: object) -> None:
        if self.lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def end(self, _: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)


def test_a_capture_that_breaks_costs_its_kind_alone(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, graphs = Torch211(steps.graphs, monkeypatch), steps.graphs
    first, second, third, *_ = graphs.kinds()
    steps.breaks = True
    assert not graphs.capture(first)
    steps.breaks = False
    assert graphs.capture(second)
    assert graphs.capture(third)
    assert graphs.num_captured == 2
    assert not card.recording


def test_after_some_captures_that_break_no_more_are_tried(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Torch211(steps.graphs, monkeypatch)
    graphs, steps.breaks = steps.graphs, True
    for _ in range(10):
        graphs.capture_next()
    assert len(steps.ran) == 3
    assert "no more steps are captured, after 3 failures" in caplog.text
    assert graphs.find(size(1), whole=True) is None
    assert not is_due(graphs)


def test_a_device_that_is_lost_ends_the_rank(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost context is no capture that failed: no step would work any more."""
    card, graphs = Torch211(steps.graphs, monkeypatch), steps.graphs
    steps.breaks = True
    monkeypatch.setattr(steps, "lose", lambda: setattr(card, "lost", True))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graphs.capture_next()


def test_capturing_takes_a_share_of_the_time(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARE", 1e-6)

    def slow(*_: object) -> object:
        time.sleep(0.01)
        return lambda: None

    monkeypatch.setattr(Graphs, "_capture", slow)
    for rows in (1, 2):
        steps.graphs.find(size(rows), whole=True)
    assert is_due(steps.graphs)
    steps.graphs.capture_next()
    assert not is_due(steps.graphs)  # although one is wanted


def test_nothing_is_found_for_what_no_bucket_holds(steps: Steps) -> None:
    assert steps.graphs.find(None, whole=True) is None
    assert steps.graphs.find(size(9), whole=True) is None
    assert not is_due(steps.graphs)
    assert steps.graphs.num_missed == 2
    steps.graphs.drop(steps.graphs.kinds()[0])
    steps.graphs.capture_next()
    assert steps.graphs.num_captured == 1
