"""The columns of plans and results, as arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from surestep_common.invariants import IntArray, PlanRows, ResultRows, check_result_rows
from surestep_proto import worker_pb2 as pb


def column(values: Iterable[int]) -> IntArray:
    return np.array(list(values), dtype=np.int64)


def rows_of(plan: pb.StepPlan) -> PlanRows:
    return PlanRows(**{name: column(getattr(plan, name)) for name in PlanRows.names()})


def check_result(
    plan: pb.StepPlan, row: int, counts: tuple[int, ...], *, ok: bool, committed: int, stopped: bool
) -> int:
    """By how many tokens the slot of a row advances; `counts`: drafts, accepted, emitted, looked up."""
    before, drafts, accepted, emitted, found = (column([n]) for n in (committed, *counts))
    no, none = np.array([False]), column([0])
    result = ResultRows(np.array([ok]), no, before, drafts, accepted, emitted, before, none, found)
    planned = PlanRows(**{name: column[row : row + 1] for name, column in rows_of(plan).columns()})
    advance = check_result_rows(
        planned, result, committed=before, ends_with_stop=np.array([stopped])
    )
    return int(advance[0])
