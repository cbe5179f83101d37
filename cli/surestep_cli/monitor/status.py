"""`surestep status`: the processes of a running server, from the gateway's /status."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from surestep_common.errors import Unavailable

from surestep_cli.api.http import api_root, call, no_answer

_NONE = "-"
_TIMEOUT_S = 10.0
_INCIDENTS = 5  # shown, of each scheduler
_MINUTE_S, _HOUR_S = 60, 3600


class ProcessRow(NamedTuple):
    """Process as a row of the table."""

    name: str
    pid: str
    address: str
    state: str
    epoch: str = _NONE
    last_step: str = _NONE  # age of the newest finished step


def show(url: str, api_key: SecretStr | None, *, as_json: bool, console: Console) -> int:
    """Print the processes; return 0 when the server serves, 1 when not. Raise Unavailable."""
    try:
        answer = call(f"{api_root(url)}/status", api_key=api_key, timeout_s=_TIMEOUT_S)
    except OSError as error:
        raise no_answer(url, error) from error
    if answer.status != 200 or answer.body is None:
        raise Unavailable(f"{url}/status answered with HTTP {answer.status}")
    if as_json:
        console.print(json.dumps(answer.body), markup=False, soft_wrap=True)
    else:
        console.print(table(answer.body))
        for line in remarks(answer.body):
            console.print(line, markup=False, soft_wrap=True)
    return 0 if answer.body["gateway"]["state"] == "SERVING" else 1


def table(status: dict[str, Any]) -> Table:
    """Return a table with one row per process."""
    result = Table("process", "pid", "address", "state", "epoch", "last step")
    for row in rows(status):
        result.add_row(*row)
    return result


def rows(status: dict[str, Any]) -> Iterator[ProcessRow]:
    """Yield the gateway, then each scheduler with its ranks behind their supervisors."""
    gateway, schedulers = status["gateway"], status["schedulers"]
    yield ProcessRow("gateway", str(gateway["pid"]), gateway["address"], gateway["state"])
    names = _models(schedulers)
    for number, scheduler in enumerate(schedulers):
        which = f" {number}" if len(schedulers) > 1 else ""
        yield from _scheduler_rows(scheduler, which + (f": {names[number]}" if names else ""))


def _models(schedulers: Sequence[dict[str, Any]]) -> list[str]:
    """Return the model of each scheduler where there are several, as older gateways do not tell."""
    names = [scheduler.get("model", "") for scheduler in schedulers]
    return names if len(set(names)) > 1 else []


def _scheduler_rows(scheduler: dict[str, Any], number: str) -> Iterator[ProcessRow]:
    status = scheduler["status"]
    if status is None:
        yield ProcessRow(f"scheduler{number}", _NONE, scheduler["url"], "SILENT")
        return
    state = status["state"]
    if scheduler["circuit_breaker"] != "CLOSED":
        state += f", circuit breaker {scheduler['circuit_breaker']}"
    yield ProcessRow(
        f"scheduler{number}",
        str(status["pid"]),
        status["address"],
        state,
        str(status["epoch"]),
        _last_step(status["last_step_age_s"], status["step"]),
    )
    ranks = {rank["rank"]: rank for rank in status["ranks"]}
    for supervisor in status["supervisors"]:
        rank = supervisor["rank"]
        address, pid = supervisor["address"], str(supervisor["pid"])
        yield ProcessRow(f"supervisor {rank}", pid, address, _supervisor_state(supervisor))
        yield _rank(rank, supervisor, ranks.pop(rank, None))
    for rank, info in sorted(ranks.items()):  # ranks without a supervisor
        yield _rank(rank, {"rank_state": "READY", "rank_address": _NONE}, info)


def _supervisor_state(supervisor: dict[str, Any]) -> str:
    parts = ["UP"]
    if supervisor["restarts"]:
        parts.append(f"{supervisor['restarts']} restarts")
    if supervisor["standby_pid"]:
        parts.append(f"standby {supervisor['standby_pid']}")
    return ", ".join(parts)


def _rank(number: int, supervisor: dict[str, Any], rank: dict[str, Any] | None) -> ProcessRow:
    heartbeat = supervisor.get("heartbeat")
    state = supervisor["rank_state"]
    if heartbeat:
        state += f", {heartbeat['phase']} for {heartbeat['age_s']:.1f} s"
    row = ProcessRow(
        f"rank {number}",
        str(supervisor.get("rank_pid") or (rank["pid"] if rank else _NONE)),
        supervisor["rank_address"] or _NONE,
        state,
    )
    if rank is None:  # loading, dead or hung
        return row
    return row._replace(
        epoch=str(rank["last_epoch"]),
        last_step=_last_step(rank["last_step_age_s"], rank["last_step"]),
    )


def remarks(status: dict[str, Any]) -> Iterator[str]:
    """Yield lines below the table: failed answers, the requests, and recent faults."""
    yield from _failures(status["answers"])
    schedulers = status["schedulers"]
    names = _models(schedulers) or [""] * len(schedulers)
    for scheduler, name in zip(schedulers, names, strict=True):
        if scheduler["status"] is not None:
            at = f"{scheduler['url']} ({name})" if name else scheduler["url"]
            yield from _remarks(at, scheduler["status"])


def _failures(answers: dict[str, Any]) -> Iterator[str]:
    failed = sum(answers["failed"].values())
    if failed:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(answers["failed"].items()))
        yield (
            f"{failed} of {answers['answers']} answers failed in the last minute ({codes}),"
            f" {answers['failed_in_streams']} of them inside streams"
        )


def _remarks(url: str, status: dict[str, Any]) -> Iterator[str]:
    requests = f"{url}: {status['num_open_requests']} open requests"
    if status["num_replaying_requests"]:
        requests += f", {status['num_replaying_requests']} of them replaying"
    yield requests
    if status["waiting_for"]:
        yield f"  does not serve: {status['waiting_for']}"
    for fault in {rank["drafter_fault"] for rank in status["ranks"]} - {""}:
        yield f"  nothing is drafted: {fault}"
    for supervisor in status["supervisors"]:
        if supervisor["failure"]:
            hope = "needs a change" if supervisor["failure_is_permanent"] else "is tried again"
            yield f"  rank {supervisor['rank']} cannot start and {hope}: {supervisor['failure']}"
    for incident in status["incidents"][:_INCIDENTS]:
        yield "  " + _incident(incident)
    for supervisor in status["supervisors"]:
        for ended in supervisor["exits"][:_INCIDENTS]:
            yield "  " + _exit(supervisor["rank"], ended)


def _incident(incident: dict[str, Any]) -> str:
    over = f"serving again after {incident['recover_s']:.1f} s"
    return (
        f"{_ago(incident['age_s'])}: epoch {incident['epoch']} was lost"
        f" ({incident['cause']}: {incident['reason']}); noticed after {incident['detect_s']:.1f} s,"
        f" {over if incident['recover_s'] else 'not over yet'},"
        f" {incident['num_replayed_requests']} requests replayed"
    )


def _exit(rank: int, ended: dict[str, Any]) -> str:
    replaced = f"replaced in {ended['replaced_s']:.1f} s"
    return (
        f"{_ago(ended['age_s'])}: rank {rank}, pid {ended['pid']}, ended"
        f" ({ended['cause']}: {ended['reason']}),"
        f" {replaced if ended['replaced_s'] else 'not replaced yet'}"
    )


def _ago(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s ago"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min ago"
    return f"{seconds / _HOUR_S:.1f} h ago"


def _last_step(seconds: float, step: int) -> str:
    return f"{seconds:.1f} s ago (#{step})" if step else _NONE
