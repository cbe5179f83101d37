"""The table of `surestep status`."""

from __future__ import annotations

from typing import Any

from surestep_cli.status import rows

GATEWAY = {"pid": 1, "address": "g:1", "state": "SERVING", "scheduler_address": "s:2"}


def scheduler(**changes: Any) -> dict[str, Any]:
    supervisor = {
        "pid": 3,
        "address": "v:3",
        "rank": 0,
        "rank_state": "READY",
        "rank_pid": 4,
        "rank_address": "r:4",
        "restarts": 2,
    }
    rank = {"rank": 0, "pid": 4, "last_epoch": 3, "last_step": 9, "last_step_age_s": 0.25}
    facts = {"pid": 2, "address": "s:2", "state": "SERVING", "epoch": 3, "step": 9}
    lists = {"last_step_age_s": 0.25, "supervisors": [supervisor], "ranks": [rank]}
    return {**facts, **lists, **changes}


def test_everything_runs() -> None:
    table = [tuple(row) for row in rows({"gateway": GATEWAY, "scheduler": scheduler()})]
    assert table == [
        ("gateway", "1", "g:1", "SERVING", "-", "-"),
        ("scheduler", "2", "s:2", "SERVING", "3", "0.2 s ago (#9)"),
        ("supervisor 0", "3", "v:3", "UP, 2 restarts", "-", "-"),
        ("rank 0", "4", "r:4", "READY", "3", "0.2 s ago (#9)"),
    ]


def test_the_scheduler_is_gone() -> None:
    table = [tuple(row) for row in rows({"gateway": GATEWAY, "scheduler": None})]
    assert table[1] == ("scheduler", "-", "s:2", "SILENT", "-", "-")


def test_a_rank_that_does_not_answer() -> None:
    table = list(rows({"gateway": GATEWAY, "scheduler": scheduler(ranks=[])}))
    assert tuple(table[-1]) == ("rank 0", "4", "r:4", "READY", "-", "-")


def test_ranks_without_supervisors() -> None:
    table = list(rows({"gateway": GATEWAY, "scheduler": scheduler(supervisors=[])}))
    assert table[-1].name == "rank 0"
    assert table[-1].pid == "4"
