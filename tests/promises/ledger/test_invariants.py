"""The column checks name the first row that is wrong, with its numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from surestep_common.invariants import (
    DECODE,
    POOL,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    IntArray,
    KnownSlots,
    LedgerError,
    PlanRows,
    ResultRows,
    check_plan_rows,
    check_result_rows,
)

# Rows of slots 7, 5, 8, 6: a piece of a prompt, its end, a decode step and a window of 3 drafts.
PLAN: dict[str, list[int]] = {
    "slot": [7, 5, 8, 6],
    "mode": [PREFILL, PREFILL_LAST, DECODE, VERIFY],
    "num_tokens": [4, 6, 0, 0],
    "len_lo": [0, 4, 10, 12],
    "len_hi": [0, 4, 12, 12],
    "max_drafts": [0, 0, 0, 3],
    "max_proposed": [0, 0, 0, 3],
    "max_looked_up": [0, 0, 0, 2],
    "accepted": [0, 0, 1, 2],
    "depends_on_step": [0, 3, 4, 4],
    "length": [0, 4, 11, 12],
    "capacity": [16, 16, 16, 16],
    "prefill_len": [10, 10, 10, 10],
    "max_len": [30, 30, 14, 17],
    "prompt_len": [10, 10, 10, 10],
    "pools": [False, False, False, False],
    "logged_accepted": [0, 0, 1, 2],
    "last_step": [0, 3, 4, 4],
    "adapter": [0, 2, 0, 1],
    "own_adapter": [0, 2, 0, 1],
}
RESULT: dict[str, list[int]] = {
    "slot": [7, 5, 8, 6],
    "mode": [PREFILL, PREFILL_LAST, DECODE, VERIFY],
    "num_tokens": [4, 6, 0, 0],
    "max_drafts": [0, 0, 0, 3],
    "max_proposed": [0, 0, 0, 3],
    "max_looked_up": [0, 0, 0, 2],
    "ok": [True, True, True, True],
    "len_before": [0, 4, 11, 12],
    "n_drafts": [0, 0, 0, 3],
    "n_accepted": [0, 0, 0, 2],
    "n_emitted": [0, 1, 1, 3],
    "n_looked_up": [0, 0, 0, 0],
    "ends_with_stop": [False, False, False, False],
    "committed": [0, 4, 11, 12],
}


def columns(rows: dict[str, list[int]], row: int = 0, **changes: Any) -> dict[str, Any]:
    """`rows` as arrays, with other values in one of them."""
    arrays = {name: np.array(values) for name, values in rows.items()}
    for name, value in changes.items():
        arrays[name][row] = value
    return arrays


def check_plan(arrays: dict[str, Any], chunk: int = 1) -> None:
    """A row's columns are the plan's, or what the checking side knows."""
    nothing = np.zeros_like(arrays["slot"])
    rows = PlanRows(**{name: arrays.get(name, nothing) for name in PlanRows.names()})
    known = {name: array for name, array in arrays.items() if name not in set(PlanRows.names())}
    check_plan_rows(rows, KnownSlots(prompt_chunk=chunk, **known))


def check_result(arrays: dict[str, Any]) -> IntArray:
    nothing = np.zeros_like(arrays["slot"])
    planned = PlanRows(**{name: arrays.get(name, nothing) for name in PlanRows.names()})
    result = ResultRows(**{name: arrays.get(name, nothing) for name in ResultRows.names()})
    known = {name: arrays[name] for name in ("committed", "ends_with_stop")}
    return check_result_rows(planned, result, **known)


def advance(row: int = 0, **changes: Any) -> IntArray:
    return check_result(columns(RESULT, row, **changes))


def test_a_right_plan_passes() -> None:
    check_plan(columns(PLAN))
    check_plan(columns(PLAN, 0, pools=True))
    check_plan(columns(PLAN, 1, mode=POOL, pools=True))
    check_plan({name: array[:0] for name, array in columns(PLAN).items()})


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (2, {"length": 9}, "slot 8: committed length 9 outside [10, 12]"),
        (2, {"length": 13}, "slot 8: committed length 13 outside [10, 12]"),
        (3, {"accepted": 1}, "slot 6: plan says 1 drafts were accepted, the log 2"),
        (3, {"logged_accepted": -1}, "slot 6: plan says 2 drafts were accepted, the log -1"),
        (3, {"last_step": 5}, "slot 6: row continues step 4, but 5 was the last one"),
        (1, {"mode": 5}, "slot 5: mode 5 cannot be planned here"),
        (1, {"mode": 0}, "slot 5: mode 0 cannot be planned here"),
        (1, {"mode": POOL}, "slot 5: mode 6 cannot be planned here"),
        (1, {"pools": True}, "slot 5: mode 2 cannot be planned here"),
        (2, {"pools": True}, "slot 8: mode 3 cannot be planned here"),
        (3, {"pools": True}, "slot 6: mode 4 cannot be planned here"),
        (
            0,
            {"mode": POOL, "pools": True},
            "slot 7: mode 6 with 4 known tokens and max_drafts 0, 0 of",
        ),
        (2, {"num_tokens": 1}, "slot 8: mode 3 with 1 known tokens"),
        (2, {"max_drafts": 1}, "slot 8: mode 3 with 0 known tokens and max_drafts 1"),
        (3, {"max_drafts": 0}, "slot 6: mode 4 with 0 known tokens and max_drafts 0"),
        (3, {"prefill_len": 13}, "slot 6: mode 4 with 0 known tokens and max_drafts 3, 12 of 13"),
        (0, {"num_tokens": 0}, "slot 7: mode 1 with 0 known tokens"),
        (0, {"max_drafts": 2}, "slot 7: mode 1 with 4 known tokens and max_drafts 2"),
        (0, {"num_tokens": 10}, "slot 7: mode 1 with 10 known tokens and max_drafts 0, 0 of 10"),
        (1, {"num_tokens": 5}, "slot 5: mode 2 with 5 known tokens and max_drafts 0, 4 of 10"),
        (0, {"num_tokens": 11}, "slot 7: mode 1 could end at token 11 of at most 10"),
        (3, {"max_len": 16}, "slot 6: mode 4 could end at token 16 of at most 15"),
        (3, {"capacity": 15}, "slot 6: blocks cover 15 tokens, the row may write 16"),
        (1, {"capacity": 9}, "slot 5: blocks cover 9 tokens, the row may write 10"),
    ],
)
def test_a_wrong_plan_is_refused(row: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(LedgerError, match=re.escape(message)):
        check_plan(columns(PLAN, row, **changes))


@pytest.mark.parametrize(
    ("row", "changes", "cut"),
    [
        (0, {}, None),
        (0, {"num_tokens": 8, "capacity": 8}, None),
        (0, {"num_tokens": 9}, None),  # behind the whole chunks anything goes
        (0, {"num_tokens": 6}, "slot 7: tokens 0 to 6 of a prompt of 10 cut a chunk of 4"),
        (0, {"len_lo": 2, "len_hi": 2, "length": 2, "num_tokens": 2}, "slot 7: tokens 2 to 4 of"),
        (0, {"num_tokens": 6, "prompt_len": 7}, None),  # the others are not of the prompt
        (0, {"num_tokens": 6, "prompt_len": 8}, "slot 7: tokens 0 to 6 of a prompt of 8 cut"),
        (2, {"length": 11, "prompt_len": 12}, None),  # decodes
    ],
)
def test_a_plan_cuts_no_chunk_of_a_prompt(
    row: int, changes: dict[str, int], cut: str | None
) -> None:
    if cut is None:
        check_plan(columns(PLAN, row, **changes), chunk=4)
        return
    with pytest.raises(LedgerError, match=re.escape(cut)):
        check_plan(columns(PLAN, row, **changes), chunk=4)


def test_slots_advance_by_what_was_consumed() -> None:
    assert advance().tolist() == [4, 6, 1, 3]
    assert advance(1, mode=POOL, n_emitted=0).tolist() == [4, 6, 1, 3]
    with pytest.raises(LedgerError, match="1 tokens emitted by a failed row or by mode 6"):
        advance(1, mode=POOL)
    assert advance(3, n_emitted=1, ends_with_stop=True).tolist() == [4, 6, 1, 1]
    assert advance(3, ok=False, n_accepted=0, n_emitted=0).tolist() == [4, 6, 1, 0]
    assert advance(0, ok=False).tolist() == [0, 6, 1, 3]


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (2, {"len_before": 10}, "slot 8: row ran from length 10, committed are 11"),
        (3, {"n_accepted": 4}, "slot 6: 4 accepted of 3 drafts of at most 3"),
        (3, {"n_drafts": 4}, "slot 6: 2 accepted of 4 drafts of at most 3"),
        (3, {"n_accepted": -1}, "slot 6: -1 accepted"),
        (3, {"n_emitted": 2}, "slot 6: 2 tokens emitted for 2 accepted drafts"),
        (3, {"n_emitted": 4}, "slot 6: 4 tokens emitted for 2 accepted drafts"),
        (3, {"n_emitted": 4, "ends_with_stop": True}, "slot 6: 4 tokens emitted for 2"),
        (3, {"n_emitted": 0, "ends_with_stop": True}, "slot 6: 0 tokens emitted for 2"),
        (3, {"ok": False}, "slot 6: 3 tokens emitted by a failed row"),
        (0, {"n_emitted": 1}, "slot 7: 1 tokens emitted by a failed row or by mode 1"),
    ],
)
def test_a_wrong_result_is_refused(row: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(LedgerError, match=re.escape(message)):
        advance(row, **changes)


def test_the_first_wrong_row_is_named() -> None:
    wrong = columns(RESULT, 3, len_before=0)
    wrong["len_before"][1] = 1
    with pytest.raises(LedgerError, match="slot 5: row ran from length 1, committed are 4"):
        check_result(wrong)


def test_drafts_are_the_drafters_forced_or_looked_up() -> None:
    proposes_one = columns(RESULT, 3, max_proposed=1)
    with pytest.raises(LedgerError, match="slot 6: 3 of 3 drafts are the drafter's"):
        check_result(proposes_one)
    found = dict(proposes_one, n_looked_up=np.array([0, 0, 0, 2]))
    assert check_result(found).tolist() == advance().tolist()
    for n_looked_up in (-1, 3, 4):
        with pytest.raises(LedgerError, match="drafts are the drafter's"):
            check_result(dict(found, n_looked_up=np.array([0, 0, 0, n_looked_up])))
