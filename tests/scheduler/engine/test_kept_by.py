"""Caches that outlived the ranks: the scheduler keeps what all of them have, of its own epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.state import Replay
from surestep_scheduler.engine.incidents import Cause, Incident, IncidentLog
from surestep_scheduler.engine.wire import kept_by

PLANNER, EPOCH = 7, 4


def rank(**changes: Any) -> pb.WorkerInfo:
    told: dict[str, Any] = {
        "planner": PLANNER,
        "epoch": EPOCH,
        "blocks": bytes([0b11010110, 0b1]),
        "drafted": bytes([0b00010110, 0b1]),
        "snapshot_ids": [1, 3],
        "snapshot_lens": [32, 64],
    }
    return pb.WorkerInfo(num_blocks=10, kept=pb.KeptCaches(**told | changes))


def test_ranks_keep_what_all_of_them_have() -> None:
    other = rank(blocks=bytes([0b01110100, 0b1]), snapshot_ids=[2, 3], snapshot_lens=[32, 64])
    kept = kept_by([rank(), other], PLANNER, EPOCH)
    assert kept is not None
    assert np.flatnonzero(kept.blocks).tolist() == [2, 4, 6, 8]
    assert np.flatnonzero(kept.drafted & kept.blocks).tolist() == [2, 4, 8]
    assert kept.snapshots == {3: 64}


@pytest.mark.parametrize(
    "other",
    [
        pb.WorkerInfo(num_blocks=10),
        rank(planner=PLANNER + 1),
        rank(epoch=EPOCH - 1),
        rank(epoch=EPOCH + 1),
        rank(blocks=b"\xff"),
    ],
)
def test_nothing_is_kept_of_anything_else(other: pb.WorkerInfo) -> None:
    assert kept_by([rank(), other], PLANNER, EPOCH) is None
    assert kept_by([other, rank()], PLANNER, EPOCH) is None


def test_an_epoch_that_did_not_begin_takes_nothing_away() -> None:
    assert kept_by([rank()], PLANNER, EPOCH + 1) is not None
    assert kept_by([rank(epoch=0)], PLANNER, EPOCH) is None


def test_what_is_kept_does_not_count_as_computed_again() -> None:
    log = IncidentLog()
    log.lost(Incident(Cause.WORKER_EXIT, "SIGKILL", 1, 10.0, 0.5, Replay(2, 30)))
    log.kept(24)
    log.kept(16)  # the next attempt
    assert (log.latest[0].num_kept, log.replayed_tokens) == (16, 14)
    log.recovered(11.0)
    log.kept(8)
    assert (log.latest[0].num_kept, log.replayed_tokens) == (16, 14)


def test_wrong_numbers_leave_nothing_behind() -> None:
    doubtful = {cause for cause in Cause if not cause.spares_caches}
    assert doubtful == {Cause.WORKER_ERROR, Cause.LEDGER, Cause.DIGEST, Cause.NON_FINITE}
