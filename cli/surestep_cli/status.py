"""`surestep status`: the processes of a running server, from the gateway's /status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from surestep_common.errors import Unavailable

from .http import get

_NONE = "-"
_TIMEOUT_S = 10.0


class Row(NamedTuple):
    """One process as the table shows it."""

    name: str
    pid: str
    address: str
    state: str
    epoch: str = _NONE
    last_step: str = _NONE  # age of the newest finished step


def show(url: str, api_key: str | None, *, as_json: bool, console: Console) -> int:
    """Print the processes. 0 when the server serves, 1 when not. Raises Unavailable."""
    try:
        answer = get(f"{url.rstrip('/')}/status", api_key=api_key, timeout_s=_TIMEOUT_S)
    except OSError as error:
        raise Unavailable(f"no answer from {url}: {error}") from error
    if answer.status != 200 or answer.body is None:
        raise Unavailable(f"{url}/status answered with HTTP {answer.status}")
    if as_json:
        console.print(json.dumps(answer.body), markup=False, soft_wrap=True)
    else:
        console.print(table(answer.body))
    return 0 if answer.body["gateway"]["state"] == "SERVING" else 1


def table(status: dict[str, Any]) -> Table:
    """One line per process."""
    result = Table("process", "pid", "address", "state", "epoch", "last step")
    for row in rows(status):
        result.add_row(*row)
    return result


def rows(status: dict[str, Any]) -> Iterator[Row]:
    """Gateway, scheduler, then each rank behind its supervisor."""
    gateway, scheduler = status["gateway"], status["scheduler"]
    yield Row("gateway", str(gateway["pid"]), gateway["address"], gateway["state"])
    if scheduler is None:
        yield Row("scheduler", _NONE, gateway["scheduler_address"], "SILENT")
        return
    yield Row(
        "scheduler",
        str(scheduler["pid"]),
        scheduler["address"],
        scheduler["state"],
        str(scheduler["epoch"]),
        _age(scheduler["last_step_age_s"], scheduler["step"]),
    )
    ranks = {rank["rank"]: rank for rank in scheduler["ranks"]}
    for supervisor in scheduler["supervisors"]:
        number = supervisor["rank"]
        restarts = supervisor["restarts"]
        state = f"UP, {restarts} restarts" if restarts else "UP"
        yield Row(f"supervisor {number}", str(supervisor["pid"]), supervisor["address"], state)
        yield _rank(number, supervisor, ranks.pop(number, None))
    for number, rank in sorted(ranks.items()):  # ranks without a supervisor
        yield _rank(number, {"rank_state": "READY", "rank_address": _NONE}, rank)


def _rank(number: int, supervisor: dict[str, Any], rank: dict[str, Any] | None) -> Row:
    row = Row(
        f"rank {number}",
        str(supervisor.get("rank_pid") or (rank["pid"] if rank else _NONE)),
        supervisor["rank_address"] or _NONE,
        supervisor["rank_state"],
    )
    if rank is None:  # loading, dead or hung
        return row
    return row._replace(
        epoch=str(rank["last_epoch"]), last_step=_age(rank["last_step_age_s"], rank["last_step"])
    )


def _age(seconds: float, step: int) -> str:
    return f"{seconds:.1f} s ago (#{step})" if step else _NONE
